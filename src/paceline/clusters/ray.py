"""Cluster of actors of Ray, which the driver makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, field
from math import ceil
from numbers import Integral
from typing import Any

from paceline.clusters.job_token import make_token
from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.placement import LOOPBACK, Placement, actor_environment
from paceline.clusters.torchrun import Torchrun
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import Call, bind, short_repr
from paceline.utils.validation import check_range

CPU, GPU, MEMORY = "CPU", "GPU", "memory"  # names of Ray
NAMES = {  # by what else a user may type, in lower case
    **dict.fromkeys(("cpu", "cpus", "num_cpus"), CPU),
    **dict.fromkeys(("gpu", "gpus", "num_gpus"), GPU),
    "memory": MEMORY,
}
NO_STANDBY = "it makes the actor of rank 0 again, and the run resumes from its last checkpoint; omit it"
FROM_RAY = {  # arguments of `Torchrun` that a user does not give here, and what to do instead
    "address": "the actors exchange their addresses; omit it",
    "device": "workers with a GPU compute on it; give resources_per_worker={'GPU': 1}",
    "ranks": "the driver numbers the actors; omit it",
    **dict.fromkeys(("standby", "standby_sync", "standby_address"), NO_STANDBY),
    "worker_at_server": "rank 0 has an actor of its own; give one more in workers",
    "workers": "each actor is a worker; omit it",
}


def _one_cpu() -> dict[str, float]:
    return {CPU: 1}


@checked_dataclass(frozen=True)
class Ray:
    """Cluster of actors of Ray: rank 0 hosts the coordinator and the server, the others are workers.

    A script or a notebook that is connected to Ray calls `pl.train` once. Each actor is a rank of the run, as under
    `Torchrun`. An actor that dies is made again under its rank, and the other workers continue. If rank 0 dies, all
    actors are made again, and the run in ``out`` is resumed from its last checkpoint. An exception in an actor ends the
    run, and is raised in the driver.

    With ``torchrun={"max_workers": 8}`` the driver asks Ray for the actors of further workers, up to eight, as soon as
    the run has begun. Each joins when Ray has resources for it; the run does not wait for them.

    Args:
        workers: number of workers with which the run begins, >= 1. A protocol without a server has an actor for each,
            else one more for rank 0.
        resources_per_worker: resources that Ray reserves for each worker, by name: "CPU" (1 if not given; also the
            number of its threads), "GPU" (a worker with one computes on it), "memory" in bytes, or one of your own.
        server_resources: the same for rank 0 where it hosts the server, which also evaluates.
        runtime_env: runtime environment of the actors, as in ``ray.remote``; None for that of the driver.
        max_restarts: number of times that each actor is made again after its death, >= 0; -1 for no limit.
        torchrun: further arguments of `Torchrun` for every actor, as ``{"wire": "bf16", "start_timeout_s": 600}``.

    Raises:
        UsageError: an argument is invalid.
    """

    workers: int
    _: KW_ONLY
    resources_per_worker: Mapping[str, float] = field(default_factory=_one_cpu)
    server_resources: Mapping[str, float] = field(default_factory=_one_cpu)
    runtime_env: Mapping[str, Any] | None = None
    max_restarts: int = -1
    torchrun: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_range("[1, inf)", Integral, workers=self.workers)
        check_range("[-1, inf)", Integral, max_restarts=self.max_restarts)
        for name in ("resources_per_worker", "server_resources"):
            _check_resources(name, getattr(self, name))
        for name, advice in FROM_RAY.items():
            if name in self.torchrun:
                raise UsageError(f"torchrun has {name!r}, which pl.Ray does not take: {advice}")
        if not isinstance(self.n, Integral) or self.n < self.workers:
            raise UsageError(
                f"torchrun has max_workers={self.n!r}, expected a whole number >= workers={self.workers}: "
                f"give max_workers={self.workers} or more, or fewer workers"
            )
        self._rank_0(self.workers + 1, is_server=True)

    def __str__(self) -> str:
        return short_repr(self)

    @property
    def n(self) -> int:
        """Number of workers; the largest one if the run may grow."""
        most: int | None = self.torchrun.get("max_workers")
        return self.workers if most is None else most

    def size(self, plan: Plan) -> int:
        """Return the number of actors with which the run begins: the workers, and the server if the plan has one."""
        return self.workers + (plan.allreduce is None)

    def fitted_to(self, plan: Plan) -> Torchrun:
        """Return the launch settings of rank 0, as if all actors were on one host.

        Raises:
            UsageError: the plan cannot run on the actors.
        """
        return self._rank_0(self.size(plan), is_server=plan.allreduce is None).fitted_to(plan)

    def resources(self, *, is_server: bool) -> Mapping[str, float]:
        """Return the resources of an actor, by name."""
        return self.server_resources if is_server else self.resources_per_worker

    def arguments(self, *, is_server: bool) -> dict[str, Any]:
        """Return the arguments of `Torchrun` in an actor, beside its address."""
        resources = self.resources(is_server=is_server)
        device = "cuda" if resources.get(GPU) else "cpu"
        return {"device": device, "threads": max(1, int(resources.get(CPU, 1))), **self.torchrun}

    def actor_options(self, *, is_server: bool) -> dict[str, Any]:
        """Return the options of an actor, as of ``ray.remote``."""
        given = dict(self.resources(is_server=is_server))
        # An actor that Ray itself makes again would have an address that no other rank gets (decision 0028).
        options: dict[str, Any] = {"num_cpus": given.pop(CPU, 1), "num_gpus": given.pop(GPU, 0), "max_restarts": 0}
        if MEMORY in given:
            options["memory"] = given.pop(MEMORY)
        if self.runtime_env is not None:
            options["runtime_env"] = dict(self.runtime_env)
        return {**options, "resources": given}

    def _rank_0(self, size: int, *, is_server: bool) -> Torchrun:
        environment = actor_environment(Placement(hosts=(LOOPBACK,) * size, port=1), 0, make_token())
        given = {**self.arguments(is_server=is_server), "ranks": LaunchEnv.from_environment(environment)}
        return bind(Call("torchrun", given), {"torchrun": Torchrun})


def _check_resources(name: str, resources: Mapping[str, float]) -> None:
    for resource, amount in resources.items():
        expected = NAMES.get(resource.lower(), resource)
        if resource != expected:
            raise UsageError(f"{name} has {resource!r}, expected {expected!r}, the name of the resource in Ray")
        check_range("[0, inf)", **{f"{name}[{resource!r}]": amount})
        if resource == GPU and amount > 1 and amount % 1:
            raise UsageError(
                f"{name}[{resource!r}]={amount!r}, expected a whole number, or a part of one GPU from 0 to 1: "
                f"give {ceil(amount)}"
            )
