"""`train` and `simulate`: from what the user says to a run and its result."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from types import UnionType

import psutil
from torch import nn

from paceline.callbacks import Callback, Memory
from paceline.catalogue import parse_plan
from paceline.cluster import Cluster, LocalCluster
from paceline.cluster_text import parse_cluster
from paceline.coordinator import Coordinator
from paceline.engines.base import Engine
from paceline.engines.local import LocalEngine
from paceline.engines.local.engine import refuse_while_importing
from paceline.engines.replica import Replica, build_model, evaluate, usable_device
from paceline.engines.virtual import TimingEngine, VirtualEngine
from paceline.errors import RunError, UsageError
from paceline.events import Outcome
from paceline.history import History, Totals
from paceline.job import Job
from paceline.minibatches import Minibatches
from paceline.protocols import Extent, Phase, Plan, Protocol, as_plan
from paceline.recorder import Recorder
from paceline.run_folder import RunFolder
from paceline.server import ParameterServer
from paceline.stop import Stop
from paceline.vectors import Layout, trainable

AnyProtocol = str | Protocol | Phase | Plan
AnyCluster = str | Cluster | LocalCluster


@dataclass(frozen=True)
class Result:
    """What a run has brought.

    Attributes:
        model: trained, on the CPU.
        history: everything that happened.
        time_s: seconds of the run's clock until the version that met the stop was made.
        stopped_by: which condition ended the run.
        reason: the same in a sentence.
        metrics: of the last version on the evaluation data; empty without any.
        folder: where the run is written down, if anywhere.
    """

    model: nn.Module
    history: History
    time_s: float
    stopped_by: Outcome
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None


def train(
    job: Job,
    *,
    protocol: AnyProtocol,
    cluster: AnyCluster,
    stop: str | Stop,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    evaluate_every: str | Extent | None = None,
    worker_timeout_s: float | None = None,
) -> Result:
    """Train a job with a protocol on a cluster.

    Args:
        job: what to train.
        protocol: such as `pl.k_sync(k=12)`, a phase, a plan, or their text: "bsp@25% >> asp".
        cluster: a simulated `Cluster`, a `LocalCluster` of processes, or their text: "local:4".
        stop: when to end, as `Stop(loss=0.2)` or "loss=0.2,seconds=600".
        seed: of everything that is drawn, >= 0.
        out: folder to write the run down in; nothing is written without it.
        overwrite: whether an earlier run in that folder may be replaced.
        callbacks: that hear what happens.
        evaluate_every: how often to measure `job.eval_data`, as `Extent("epochs", 1)` or "epochs=1"; once an epoch
            (or 100 updates, for data without a length) if there are any and nothing is given.
        worker_timeout_s: silence after which a worker is taken for lost; derived from round trips if not given.

    Raises:
        UsageError: what was asked for cannot work; nothing has run.
        RunError: the run could not go on.
    """
    refuse_while_importing()
    plan = parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    evaluate_every = Extent.parse(evaluate_every) if isinstance(evaluate_every, str) else evaluate_every
    _check_kinds(job=(job, Job), cluster=(cluster, Cluster | LocalCluster), stop=(stop, Stop))
    n = cluster.n
    per_epoch = _gradients_per_epoch(job, n)
    plan = plan.checked(n, total=stop.workload(per_epoch), per_epoch=per_epoch)
    cluster.check_plan(plan)
    coordinator = Coordinator(
        plan,
        workers=n,
        stop=stop,
        per_epoch=per_epoch,
        minibatches=_minibatches(job, n),
        learning_rate=job.learning_rate,
        worker_timeout_s=worker_timeout_s,
        evaluate_every=_evaluations(job, stop, evaluate_every, per_epoch),
    )
    model = build_model(job, seed)
    if isinstance(cluster, Cluster):
        model = model.to(usable_device(cluster.device))
    layout = Layout(model)
    _check_memory(layout, n)
    server = ParameterServer(job, model, layout, per_epoch)
    configuration = {
        "job": job.name,
        "protocol": str(plan),
        "cluster": str(cluster),
        "stop": str(stop),
        "seed": seed,
        "batch_size": job.batch_size,
        "workers": n,
        "memory": memory_note(layout, n),
        "parameters": sum(parameter.numel() for parameter in trainable(model)),
    }
    folder = RunFolder(Path(out), configuration, overwrite) if out is not None else None
    memory = Memory()
    heard = [folder or memory, *callbacks]
    recorder = Recorder(n, job.batch_size, memory_note(layout, n), lambda: server.learning_rate, heard)
    try:
        with _engine(job, cluster, seed, server, layout) as engine:
            end = engine.run(coordinator, recorder.observe)
        measurable = job.eval_data is not None and not end.outcome.is_failure
        recorder.end(end, coordinator.version, evaluate(job, model, seed) if measurable else {})
    finally:  # whatever ended it, what was learned is kept
        model = model.cpu()
        model.zero_grad(set_to_none=True)
        if folder is not None:
            folder.save_model(model.state_dict())
            folder.close()
    return Result(
        model=model,
        history=folder.history if folder else History(lambda: memory.records, recorder.totals),
        time_s=recorder.reached_s,
        stopped_by=end.outcome,
        reason=end.reason,
        metrics=recorder.evaluation.metrics if recorder.evaluation else {},
        folder=folder.path if folder else None,
    )


@dataclass(frozen=True)
class Simulated:
    """What a simulation of the timing alone has brought.

    Attributes:
        time_s: virtual seconds.
        totals: counts; samples stand for gradients here.
    """

    time_s: float
    totals: Totals

    @property
    def seconds_per_update(self) -> float:
        """Virtual seconds per update."""
        return self.time_s / self.totals.updates if self.totals.updates else nan


def simulate(
    protocol: AnyProtocol,
    cluster: str | Cluster,
    *,
    updates: int,
    seed: int = 0,
    payload_bytes: float = 0,
) -> Simulated:
    """Simulate the timing of a protocol on a cluster, without any gradient.

    Args:
        protocol: as for `train`.
        cluster: a simulated one.
        updates: to make, >= 1.
        seed: of the simulated times.
        payload_bytes: size of the parameters, and of a gradient, for the cluster's network.

    Example:
        >>> import paceline as pl
        >>> simulated = pl.simulate(pl.asp(), pl.Cluster(4, pl.Deterministic(1.0)), updates=100)
        >>> simulated.time_s, simulated.totals.used
        (25.0, 100)
    """
    plan = parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)
    simulated = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(simulated, Cluster):
        raise UsageError(f"{cluster!r} runs in real time; give a simulated cluster such as '4*exp(mean=1)'")
    plan = plan.checked(simulated.n, total=None, per_epoch=None)
    simulated.check_plan(plan)
    coordinator = Coordinator(plan, workers=simulated.n, stop=Stop(updates=updates))
    with TimingEngine(simulated, seed, payload_bytes) as engine, _collector_paused():
        end = engine.run(coordinator)
    if end.outcome is Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    if end.outcome.is_failure:
        raise RunError(f"after {coordinator.version} of {updates} updates: {end.reason}")
    return Simulated(engine.now, engine.totals())


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Spare a simulation the search for cycles: it makes none, and torch's objects are many to go through."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def memory_note(layout: Layout, n: int) -> str:
    """Say how much memory the versions of n workers may take."""
    return (
        f"up to {n + 1} versions of {layout.nbytes / 2**20:.3g} MiB for {n} workers: "
        f"{(n + 1) * layout.nbytes / 2**20:.3g} MiB"
    )


def _engine(job: Job, cluster: Cluster | LocalCluster, seed: int, server: ParameterServer, layout: Layout) -> Engine:
    if isinstance(cluster, LocalCluster):
        return LocalEngine(job, cluster, seed, server, layout)
    replica = Replica(job, seed, cluster.n, device=cluster.device)
    return VirtualEngine(cluster, seed, replica, server)


def _shards(job: Job, n: int) -> int:
    return n if job.sharding == "partitioned" else 1


def _gradients_per_epoch(job: Job, n: int) -> int | None:
    shards = _shards(job, n)
    per_shard = job.minibatches_per_epoch(shards)
    return per_shard and per_shard * shards


def _minibatches(job: Job, n: int) -> Minibatches | None:
    if job.sampling == "replacement" and job.sharding == "shared":
        return None
    return Minibatches(
        n,
        per_epoch=job.minibatches_per_epoch(_shards(job, n)) if job.sampling == "epoch" else None,
        partitioned=job.sharding == "partitioned",
        requeue=job.on_drop == "requeue",
    )


def _evaluations(job: Job, stop: Stop, every: Extent | None, per_epoch: float | None) -> Extent | None:
    if job.eval_data is None:
        if stop.accuracy is not None or every is not None:
            raise UsageError(f"job {job.name} has nothing to evaluate on; give it eval_data")
        return None
    if every is None:
        return Extent("gradients", per_epoch) if per_epoch else Extent("updates", 100)
    return every.in_gradients(stop.workload(per_epoch), per_epoch)


def _check_kinds(**given: tuple[object, type | UnionType]) -> None:
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            wanted = (
                str(kind).replace("paceline.cluster.", "pl.") if isinstance(kind, UnionType) else f"pl.{kind.__name__}"
            )
            raise UsageError(f"{name} = {value!r}, expected a {wanted}")


def _check_memory(layout: Layout, n: int) -> None:
    # Versions, a gradient a worker, the parameters, their mean gradient, and as much for the optimizer.
    needed = (n + 1 + n + 3) * layout.nbytes
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"{memory_note(layout, n)}, but {available / 2**20:.3g} MiB are available; "
            "use fewer workers or a smaller model"
        )
