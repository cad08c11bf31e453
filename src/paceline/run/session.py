"""Construction of the parts of one run from its configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.fingerprint import identity, identity_of_replica
from paceline.clusters.local import LocalCluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import Torchrun
from paceline.core.wire import parse_wire
from paceline.engines import distributed
from paceline.engines.distributed import THIS_PROCESS, Host
from paceline.engines.local import LocalWorkers
from paceline.engines.loop import RunLoop
from paceline.engines.run import Run
from paceline.engines.virtual.allreduce import simulated_allreduce
from paceline.engines.virtual.parameter_server import simulated_server
from paceline.errors import UsageError
from paceline.jobs.job import trainable
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.momentum import KEEP
from paceline.recording.callback import Callback
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import versions
from paceline.recording.schema import SCHEMA
from paceline.recording.source_digest import code_of, main_module_of
from paceline.run.config import RunConfig
from paceline.run.cut_minibatches import with_cut_minibatches
from paceline.run.memory import check_memory, memory_note
from paceline.run.plan_json import plan_as_json
from paceline.server.optimizer import check_momentum, warn_of_parameters_left_out
from paceline.server.outer_optimizer import server_job
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.compiled_arithmetic import stale_arithmetic
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.allreduce import make_algorithm
from paceline.worker.allreduce.base import AllReduceAlgorithm
from paceline.worker.evaluation import check_reported, evaluate
from paceline.worker.local_steps import make_replica
from paceline.worker.loss_check import warn_of_summed_loss
from paceline.worker.task_runner import device_of
from paceline.worker.torch_utils import build_model, usable_device


class Session:
    """Parts of one run: coordinator, model, server and engine.

    Args:
        config: configuration of the run.
        host: process in which this rank of a distributed run runs.
    """

    def __init__(self, config: RunConfig, host: Host = THIS_PROCESS) -> None:
        self._given = config
        self._host = host
        job, cluster = config.job, config.cluster
        self.model = build_model(job, config.seed)
        if isinstance(cluster, Cluster):
            self.model = self.model.to(usable_device(cluster.device))
        elif isinstance(cluster, Torchrun) and config.plan.allreduce is not None:
            distributed.check_summable(self.model)
            self.model = self.model.to(host.device or device_of(cluster.device, cluster.ranks.local_rank))
        self.config = config = with_cut_minibatches(config, self.model)
        self.coordinator = config.rules.coordinator(config.checked_plan, config.stop)
        check_reported(job, self.model, config.seed, config.stop)
        if any(controller.reads != "times" for phase in config.plan.phases for controller in phase.controllers):
            warn_of_summed_loss(job, self.model)
        ranks = cluster.ranks_of_shards if isinstance(cluster, Torchrun) else [0]
        self.shards = distributed.ShardClients(ranks)
        self.layout = _layout(self.model, len(ranks), config.plan.allreduce)
        check_memory(self.layout, config.plan, self._sharing, is_compressed=_is_compressed(cluster))
        trained = server_job(job, config.plan.local_steps)
        if host.make_optimizer is not None:
            trained = replace(trained, optimizer=host.make_optimizer)
        self.server = ParameterServer(
            job=trained,
            model=self.model,
            layout=self.layout,
            per_epoch=config.per_epoch,
            peers=self.shards,
            workers=cluster.n,
        )
        if not isinstance(cluster, Torchrun) or cluster.is_server:
            warn_of_parameters_left_out(job, self.server.optimizer, self.model)
            if config.plan.local_steps is None:  # else workers watch the gradients of their steps
                self.server.watch_gradients()
        self._step_scale = self._check_step_scale()
        if config.measure_steps and config.plan.allreduce and config.plan.allreduce.sums == "updates":
            raise UsageError(
                f"measure_steps: each worker of {config.plan} applies its own steps, so an update has no single "
                "step; remove measure_steps, or use all_reduce"
            )
        if any(phase.momentum != KEEP for phase in config.plan.phases):
            check_momentum(job, self.server.optimizer)

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """Configuration of the run in the form of `run.json`."""
        config, job = self.config, self.config.job
        return {
            "schema": SCHEMA,
            "job": job.name,
            "main_module": main_module_of(vars(job).values()),
            "protocol": str(config.checked_plan),
            "cluster": str(config.cluster),
            "stop": str(config.stop),
            "stops_before": [],
            "seed": config.seed,
            "batch_size": job.batch_size,
            "workers": config.cluster.n,
            "has_standby": isinstance(config.cluster, Torchrun) and config.cluster.has_standby,
            "memory": memory_note(self.layout, self._sharing),
            "parameters": sum(parameter.numel() for parameter in trainable(self.model)),
            "plan": plan_as_json(config.checked_plan),
            "rules": config.rules.as_json(),
            "threads": torch.get_num_threads(),
            "identity": identity(job, self.server),
            "step_scale": self._step_scale,
            "compensation": self._compensated_by(),
        }

    @property
    def has_whole_model(self) -> bool:
        """Whether the model here is that of the run, and no shard of it."""
        return not isinstance(self.config.cluster, Torchrun) or self.config.cluster.group_size == 1

    @property
    def _sharing(self) -> int:
        """Number of workers whose versions and gradients this process stores."""
        is_one_of_many = isinstance(self.config.cluster, Torchrun) and self.config.plan.allreduce is not None
        return 1 if is_one_of_many else self.config.cluster.n

    def _check_step_scale(self) -> str:
        """Return what the compensators scale, as text; empty if no compensator scales steps."""
        compensators = [each for phase in self.config.plan.phases for each in phase.compensators]
        scales = any(compensator.kind == "scale" for compensator in compensators)
        return f"multiplies the {self.server.scaled_part}" if scales else ""

    def _compensated_by(self) -> str:
        """Return the library that computes the sums of compensators; empty if there are none."""
        plan = self.config.plan
        corrects = plan.allreduce is not None and plan.allreduce.correction is not None
        if not corrects and not any(phase.compensators for phase in plan.phases):
            return ""
        return stale_arithmetic(self.server.state.flat_parameters).name

    def recorder(self, callbacks: Sequence[Callback]) -> Recorder:
        """Return the recorder of this run."""
        n, job = self.config.cluster.n, self.config.job
        note, local_steps = memory_note(self.layout, self._sharing), self.config.plan.local_steps
        return Recorder(
            workers=n,
            batch_size=job.batch_size,
            memory=note,
            learning_rate=lambda: self.server.learning_rate,
            callbacks=callbacks,
            local_steps=local_steps,
        )

    def engine(self) -> Run:
        """Return what runs on the cluster."""
        job, cluster, seed = self.config.job, self.config.cluster, self.config.seed
        if isinstance(cluster, LocalCluster):
            local_steps, folder = self.config.plan.local_steps, self.config.folder
            workers = LocalWorkers(
                job=job,
                cluster=cluster,
                seed=seed,
                server=self.server,
                layout=self.layout,
                local_steps=local_steps,
                folder=folder,
            )
            return RunLoop(workers, workers.parameters, workers.clock)
        if isinstance(cluster, Torchrun):
            rank, stop = rank_of(self._given, self._host), str(self.config.stop)
            return distributed.make_engine(rank, self.server, self.layout, self.shards, stop)
        local_steps = self.config.plan.local_steps
        allreduce = self.config.plan.allreduce
        if allreduce is not None:
            replica = make_replica(job, seed, cluster.n, device=cluster.device, shards=allreduce.fragments)
            return simulated_allreduce(cluster, seed, allreduce, replica, self._workers(allreduce, cluster.n))
        replica = make_replica(job, seed, cluster.n, local_steps=local_steps, device=cluster.device)
        return simulated_server(cluster, seed, replica, self.server, local_steps)

    def _workers(self, allreduce: AllReduceConfig, n: int) -> list[AllReduceAlgorithm]:
        """Return the all-reduce algorithms of n simulated workers, the first with the parameters of this session."""
        first = make_algorithm(allreduce, self.server, self.layout)
        if allreduce.sums == "gradients":
            return [first] * n  # all hold equal parameters
        return [first, *(make_algorithm(allreduce, self._another_server(), self.layout) for _ in range(n - 1))]

    def _another_server(self) -> ParameterServer:
        job, seed = self.config.job, self.config.seed
        model = build_model(job, seed).to(self.server.device)
        return ParameterServer(job, model, self.layout, self.config.per_epoch, workers=self.config.cluster.n)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current parameters; return nothing without evaluation data."""
        return evaluate(self.config.job, self.model, self.config.seed) if self.config.evaluations else {}


def _layout(model: nn.Module, servers: int, allreduce: AllReduceConfig | None) -> FlatLayout:
    """Return the layout of what this process holds: the first server's shard, or all fragments without a server."""
    if allreduce is None:
        return FlatLayout(model, servers, only=0)
    tensors = len([*trainable(model), *model.buffers()])
    if allreduce.fragments > tensors:
        raise UsageError(
            f"fragments={allreduce.fragments}, but the model has {tensors} tensors, and a fragment has at least one; "
            f"give at most fragments={tensors}"
        )
    return FlatLayout(model, allreduce.fragments)


def _is_compressed(cluster: Cluster | LocalCluster | Torchrun) -> bool:
    if isinstance(cluster, LocalCluster):
        return False
    return parse_wire(cluster.wire if isinstance(cluster, Torchrun) else cluster.network.wire) is not None


def job_spec(config: RunConfig, model: nn.Module) -> dict[str, Any]:
    """Return the settings that must be equal on all processes of a distributed run, as plain JSON data."""
    assert isinstance(config.cluster, Torchrun)
    is_open = config.cluster.max_workers is not None
    parts = [*vars(config.job).values(), *{type(layer) for layer in model.modules()}]
    spec = {
        **({} if is_open else {distributed.WORLD_SIZE: config.cluster.ranks.world_size}),
        "seed": config.seed,
        "workers": config.cluster.workers,
        "group_size": config.cluster.group_size,
        "max_workers": config.cluster.max_workers,
        "standby": config.cluster.standby,
        "debug": config.cluster.debug,
        "wire": config.cluster.wire,
        "server": config.cluster.has_server,
        "protocol": str(config.checked_plan),
        "plan": plan_as_json(config.checked_plan),
        "stop": str(config.stop),
        "rules": config.rules.as_json(),
        **_without_shards(identity_of_replica(config.job, model), config.cluster),
        distributed.SAMPLES: getattr(config.job.data, "digest", ""),
        distributed.FROZEN: getattr(config.job, "frozen", ""),
        "order of the samples": getattr(config.job.data, "order", ""),
        "shards": config.cluster.shards,
        "versions": versions(),
        # A spawned sidecar has another main module, and got the parts of this one by pickle.
        "code of": code_of(parts, with_main=not config.cluster.ranks.spawns_sidecars),
    }
    plain: dict[str, Any] = json.loads(json.dumps(spec))
    return plain


def _without_shards(identity: dict[str, Any], cluster: Torchrun) -> dict[str, Any]:
    """Return the identity of a replica; without its shapes if each rank has a shard, which may be a row longer."""
    return identity if cluster.group_size == 1 else {**identity, "model": ""}


def rank_of(config: RunConfig, host: Host) -> distributed.Rank:
    """Return the settings of a process of a distributed run."""
    assert isinstance(config.cluster, Torchrun)
    make_job_spec = partial(job_spec, config)
    return distributed.Rank(
        job=config.job,
        cluster=config.cluster,
        seed=config.seed,
        plan=config.checked_plan,
        per_epoch=config.per_epoch,
        make_job_spec=make_job_spec,
        host=host,
        folder=config.folder,
    )


def take_part(config: RunConfig, host: Host = THIS_PROCESS) -> tuple[nn.Module, distributed.End]:
    """Take part in the run of rank 0 until it ends; return the trained model, and why the run ended.

    Raises:
        UsageError: rank 0 has other settings, or the job cannot work.
        RunError: the run has failed.
        RunFinished: the run ended before this process took part.
    """
    config.check()
    return distributed.take_part(rank_of(config, host), partial(_train, config, host))


def _train(config: RunConfig, host: Host) -> tuple[nn.Module, distributed.End]:
    """Train with the other ranks, of which only rank 0 writes a run folder."""
    session = Session(config, host)
    engine = session.engine()
    assert isinstance(engine, distributed.RankRun)
    with engine:
        engine.run(session.coordinator)
    model = session.model.cpu()
    model.zero_grad(set_to_none=True)
    return model, engine.end
