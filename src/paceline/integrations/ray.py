"""Backend of Ray Train: each worker is a rank of one run, and a worker that dies is replaced alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from paceline.clusters.job_token import make_token
from paceline.clusters.placement import Placement, actor_environment
from paceline.run.ray_actors import free_port


class PacelineConfig(TorchConfig):  # type: ignore[misc]  # no types without the package
    """Configuration of Ray Train for workers that are the ranks of one run.

    Give it to a trainer, as ``TorchTrainer(loop, torch_config=PacelineConfig())``. Each worker then has the launch
    variables of torchrun and a token, and no process group. The loop calls `pl.train` or `pl.attach`. When a worker
    fails, Ray Train starts another one under its rank, at most ``FailureConfig(max_failures=...)`` times, while the
    others continue. When rank 0 fails, all start again, and the run in ``out`` is resumed from its last checkpoint.
    """

    def __init__(self) -> None:
        super().__init__(backend="gloo")  # TorchTrainer reads it; no process group uses it

    @property
    def backend_cls(self) -> type[Backend]:
        """Class of the backend that Ray Train makes."""
        return PacelineBackend


class PacelineBackend(Backend):  # type: ignore[misc]
    """Backend that sets the launch variables of the workers when they start."""

    has_replica_groups = True  # each worker is one, so that Ray Train replaces it alone

    def __init__(self) -> None:
        self._token = make_token()
        self._placement: Placement | None = None

    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """Set the launch variables of workers that have started: all, or one in place of a worker that has failed."""
        hosts = dict(worker_group.execute(_rank_and_host))
        before = self._placement
        if before is not None and len(hosts) < worker_group.execute_single(0, _world_size):
            placement = before.replaced(hosts)
        else:
            port = worker_group.execute_single(0, free_port)
            placement = Placement(hosts=tuple(hosts.values()), port=port, starts=before.starts + 1 if before else 1)
        self._placement = placement
        for place, rank in enumerate(hosts):
            worker_group.execute_single(place, _set_environment, actor_environment(placement, rank, self._token))


def _rank_and_host() -> tuple[int, str]:
    return ray.train.get_context().get_world_rank(), ray.util.get_node_ip_address()


def _world_size() -> int:
    size: int = ray.train.get_context().get_world_size()
    return size


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
