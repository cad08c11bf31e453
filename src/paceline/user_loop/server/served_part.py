"""Part of a rank in a run with a coordinator, which is a process beside rank 0, and mostly a server."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path

from paceline.clusters.launch_env import LaunchEnv
from paceline.clusters.torchrun import Torchrun
from paceline.core.stop import Stop
from paceline.engines.distributed import Host, Sidecar
from paceline.errors import UsageError
from paceline.protocols.protocol import Plan
from paceline.recording.callback import Callback
from paceline.recording.run_folder import standby_folder
from paceline.run.config import RunConfig
from paceline.run.plan_json import plan_as_json, plan_of
from paceline.run.session import take_part
from paceline.run.spawned_sidecar import SpawnedSidecar
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.data.pieces import check_hosts
from paceline.user_loop.rank_part import RankPart
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.description import (
    Description,
    FirstTensors,
    OwnCode,
    SentRun,
    ServerRun,
    describe,
    first_of_coordinator,
    make_job,
    tensors_of,
)
from paceline.user_loop.server.optimizer_state import named_state
from paceline.user_loop.server.server_process import ServerProcess
from paceline.user_loop.server.standby_process import StandbyProcess
from paceline.user_loop.step_policies import RankSteps, ServerSteps
from paceline.user_loop.worker.exchange import Exchange, LoopEnd
from paceline.user_loop.worker.loop_lifecycle import LoopLifecycle
from paceline.user_loop.worker.loop_optimizer import check_own_steps
from paceline.user_loop.worker.loop_replicas import LoopReplicas
from paceline.user_loop.worker.optimizer_copy import copies_of, pickled_by_value

TLS = ("encrypt", "tls_cert", "tls_key", "tls_ca")
OF_THE_SERVER = (
    "address",
    "server",
    "standby",
    "standby_address",
    "wire",
    "workers",
    "group_size",
    "shards",
    *TLS,
    "min_workers",
    "max_workers",
    "start_timeout_s",
    "heartbeat_timeout_s",
    "notice",
    "bytes_per_s",
    "share_memory",
    "deterministic",
)


class ServedPart(RankPart):
    """Part of one rank in a run with a server, or with a coordinator whose ranks sum their gradients.

    Model and optimizer are read when the run begins, so a checkpoint may be loaded after `attach`.

    Args:
        loop: parts of the loop.
        plan: protocol of each phase.
        cluster: how the processes reach each other.
        environment: launch settings of this process.
        options: seed, folder, checkpoints and limits.
        callbacks: callbacks, which run in the process of the coordinator.

    Raises:
        UsageError: the server cannot step the optimizer.
    """

    def __init__(
        self,
        loop: UserLoop,
        plan: Plan,
        cluster: Torchrun,
        environment: LaunchEnv,
        options: RunOptions,
        callbacks: tuple[Callback, ...] = (),
    ) -> None:
        self._steps_here = plan.local_steps is not None
        if self._steps_here:
            check_own_steps(loop)
        self._loop = loop
        self._cluster = cluster
        is_of_torch = self._describe().is_of_torch  # else only checked; the run reads it when it begins (decision 0022)
        if cluster.shards > 1 and not is_of_torch and not self._steps_here:
            raise UsageError(
                f"shards={cluster.shards}: the servers of several shards step optimizers of torch.optim, but the loop "
                f"has a {type(loop.optimizer).__name__}: omit shards"
            )
        self._own = OwnCode(None if _is_of_paceline(plan) else plan, callbacks)
        self.exchange = Exchange()
        self.lifecycle = LoopLifecycle(has_server=True)
        read_copy = None if cluster.has_server else lambda: self.lifecycle.read_state()
        self.steps = (
            RankSteps(loop.optimizer)
            if self._steps_here
            else ServerSteps(loop.optimizer, loop.model, read_copy, has_shards=cluster.shards > 1)
        )
        self.host = Host(
            lifecycle=self.lifecycle,
            make_replica=LoopReplicas(
                self.exchange,
                loop,
                is_summed_early=plan.counts_all and not cluster.has_server and cluster.group_size == 1,
            ),
            make_optimizer=None if is_of_torch else copies_of(loop.optimizer, loop.model),
            device=loop.device,
        )
        self._plan = plan
        self._environment = environment
        self._options = options
        self.ranks = self._own_cluster.started
        check_hosts(plan, loop, self._own_cluster.node_size)
        self._own_cluster.fitted_to(plan)
        self.has_standby = bool(cluster.standby)
        folder = options.out if options.resume is None else options.resume
        if self._own_cluster.standby_number in self._own_cluster.sidecars_here and folder is not None:
            self.standby_folder = standby_folder(Path(folder))

    @property
    def _own_cluster(self) -> Torchrun:
        """Launch settings of the worker of this rank."""
        ranks = _ranks(self._environment, self._environment.rank + 1)
        notice = self._cluster.notice if self._environment.rank else None  # the server ends the run of rank 0
        return replace(self._cluster, worker_at_server=False, notice=notice, ranks=ranks)

    def config(self, stop: Stop) -> RunConfig:
        """Return the configuration of this rank."""
        job = make_job(self._training, tensors_of(self._loop.model))
        return self._options.config(job, self._plan, self._own_cluster, stop)

    def start_server(self, stop: Stop) -> ServerProcess | None:
        """Start the server if this is rank 0."""
        if self._environment.rank:
            return None
        return ServerProcess(self._sent(stop, _ranks(self._environment, 0)))

    def _sent(self, stop: Stop, ranks: LaunchEnv) -> SentRun:
        """Return the run of the process of the coordinator, or of its standby."""
        run = ServerRun(
            training=self._training,
            plan=plan_as_json(self._plan),
            stop=",".join(stop.conditions),
            options=self._options,
            cluster={name: _plain(getattr(self._cluster, name)) for name in OF_THE_SERVER},
            ranks=asdict(ranks),
        )
        model, optimizer = self._loop.model, self._loop.optimizer
        size = self._cluster.group_size
        state = {} if self._steps_here or size > 1 else named_state(optimizer, model)
        is_sent = self._cluster.has_server and not self._steps_here and not self._training.is_of_torch
        sent = pickled_by_value(optimizer, model) if is_sent else b""
        first = FirstTensors(first_of_coordinator(tensors_of(model), size), state)
        return SentRun(run, first, optimizer=sent, own=self._own.by_value())

    def take_part(self, config: RunConfig) -> LoopEnd:
        """Take part in the run until its end."""
        return LoopEnd(*take_part(config, replace(self.host, start_sidecar=partial(self._start_sidecar, config))))

    def _start_sidecar(self, config: RunConfig, worker: int, server: tuple[str, int] | None = None) -> Sidecar:
        """Start the server of another shard, or the standby."""
        if worker != self._own_cluster.standby_number:
            return SpawnedSidecar(config, worker, server)
        ranks = replace(self._own_cluster.ranks, sidecar=worker)
        return StandbyProcess(worker, self._sent(config.stop, ranks))

    @cached_property
    def _training(self) -> Description:
        return self._describe()

    def _describe(self) -> Description:
        return describe(self._loop, steps_here=self._steps_here)


def _is_of_paceline(plan: Plan) -> bool:
    """Return whether another process can make a plan from its JSON, without code of the user."""
    try:
        return plan_of(plan_as_json(plan)).phases == plan.phases
    except UsageError:
        return False


def _ranks(environment: LaunchEnv, rank: int) -> LaunchEnv:
    """Return the launch settings of a process of the run: the server is its rank 0, beside rank 0 of torchrun."""
    beside = environment.node == 0 or environment.local_world_size == environment.world_size
    return replace(
        environment,
        rank=rank,
        ranks_before=1,
        world_size=environment.world_size + 1,
        local_world_size=environment.local_world_size + beside,
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
