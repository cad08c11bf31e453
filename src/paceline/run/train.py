"""`train` and `simulate`: from what the user says to a run and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from paceline.catalogue.parser import parse_plan
from paceline.clusters.local import LocalCluster
from paceline.clusters.parser import parse_cluster
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import Torchrun
from paceline.coordinator.coordinator import Coordinator
from paceline.core.duration import Duration
from paceline.core.events import Command, Event, Outcome
from paceline.core.events import EndRun as EndCommand
from paceline.core.stop import Stop
from paceline.engines.base import Engine
from paceline.engines.distributed.rendezvous.handshake import RunOver
from paceline.engines.distributed.rendezvous.rendezvous import is_restart
from paceline.engines.signals import holding_sigterm, release_sigterm
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.callback import Callback, Memory
from paceline.recording.callbacks.progress_line import shown
from paceline.recording.history import History
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import RUN, RunFolder
from paceline.run.checkpointer import Checkpointer, CheckpointPolicy
from paceline.run.config import RunConfig
from paceline.run.resume import Resumption
from paceline.run.run_log import RunLog
from paceline.run.session import Session, serve
from paceline.utils.argument_types import checked_types
from paceline.utils.rank_logger import RankLogger
from paceline.utils.representation import Representation

LOG = RankLogger(__name__)

AnyProtocol = str | Protocol | Phase | Plan
AnyCluster = str | Cluster | LocalCluster | Torchrun


@dataclass(frozen=True, repr=False)
class Result(Representation):
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

    def _facts(self) -> Mapping[str, object]:
        facts = {"stopped_by": self.stopped_by, "reason": self.reason, "time_s": self.time_s}
        return {**facts, **self.history.known_counts, **self.metrics, "folder": self.folder}


@checked_types
@holding_sigterm()
def train(
    job: Job,
    *,
    protocol: AnyProtocol,
    cluster: AnyCluster,
    stop: str | Stop,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: str | Path | None = None,
    allow_change: bool = False,
    callbacks: Sequence[Callback] = (),
    evaluate_every: str | Duration | None = None,
    checkpoint_every: str | Duration = "seconds=60",
    keep_checkpoints: int = 3,
    worker_timeout_s: float | None = None,
    measure_steps: bool = False,
    progress: bool | None = None,
) -> Result:
    """Train a job with a protocol on a cluster.

    Args:
        job: what to train.
        protocol: such as `pl.k_sync(k=12)`, a phase, a plan, or their text: "bsp@25% >> asp".
        cluster: a simulated `Cluster`, a `LocalCluster` of processes, `Torchrun`, or their text: "local:4". Every rank
            that torchrun has started calls this with the same arguments. Rank 0 writes and tells; the others compute
            until it is done, and their result has the trained model and why the run ended, and no history. Where
            torchrun has started them again, the run in `out` goes on from its last checkpoint.
        stop: when to end, as `Stop(loss=0.2)` or "loss=0.2,seconds=600".
        seed: of everything that is drawn, >= 0.
        out: folder to write the run down in; nothing is written without it.
        overwrite: whether an earlier run in that folder may be replaced.
        resume: folder of a run of the same job to go on with, instead of `out`. A simulated run goes on bit for bit
            as if it had never stopped; a real one from its last checkpoint.
        allow_change: whether protocol and cluster may differ from those of the run that is resumed.
        callbacks: that hear what happens.
        evaluate_every: how often to measure `job.eval_data`, as `Duration("epochs", 1)` or "epochs=1"; once an epoch
            (or 100 updates, for data without a length) if there are any and nothing is given.
        checkpoint_every: how often the run is saved in its folder, as "updates=100" or "seconds=60", which are
            seconds of real time; it is saved at its beginning, after its first update and at its end, too. Ranks under
            `local_sgd` are saved when they have their average: at the first sum, or evaluation, after that time.
        keep_checkpoints: how many of them are kept, >= 1.
        worker_timeout_s: silence after which a worker is declared lost, in seconds, > 0. If not given, it is derived
            from the round trips of real workers, see `paceline.policies.estimators.round_trip_timeout`; a simulated
            worker is then lost by a scripted fault only.
        measure_steps: whether the log tells of every update how far it moved the parameters, which `pl.advise` needs;
            it costs up to three additions of the parameters an update.
        progress: whether to show how the run is doing, in a line on standard error; None for on a terminal and in a
            notebook only.

    Raises:
        UsageError: what was asked for cannot work; nothing has run.
        RunError: the run could not go on.
    """
    refuse_while_unpickling()
    plan = parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    cluster = cluster.fitted_to(plan) if isinstance(cluster, Torchrun) else cluster
    setting = RunConfig(
        job,
        plan,
        cluster,
        stop,
        seed,
        _extent(evaluate_every) if evaluate_every is not None else None,
        worker_timeout_s,
        measure_steps,
    )
    if isinstance(cluster, Torchrun) and not cluster.is_server:
        release_sigterm()
        return _serve(setting)
    if resume is None and out is not None and _is_started_again(cluster, Path(out)):
        out, resume = None, out
    habit = CheckpointPolicy(setting.in_gradients(_extent(checkpoint_every)), keep_checkpoints)
    session = Session(setting)
    if resume is None:
        folder = RunFolder(Path(out), session.configuration, overwrite=overwrite) if out is not None else None
        past = None
    elif out is not None:
        raise UsageError(f"out={str(out)!r} and resume={str(resume)!r}: a resumed run stays where it is; give one")
    else:
        past = Resumption(Path(resume), session, allow_change)
        folder = RunFolder(Path(resume), session.configuration, overwrite=True, keep=past.kept)
    title = protocol if isinstance(protocol, str) else str(plan)
    with shown(progress, title, stop, stop.workload(setting.per_epoch), cluster.n) as line:
        return _run(session, folder, past, [*callbacks, *line], habit)


def _is_started_again(cluster: Cluster | LocalCluster | Torchrun, out: Path) -> bool:
    """Return whether torchrun has started the ranks again, after the run in this folder had begun."""
    return isinstance(cluster, Torchrun) and is_restart(cluster, str(out.resolve())) and (out / RUN).exists()


def _serve(setting: RunConfig) -> Result:
    try:
        model, end = serve(setting)
    except RunOver as over:
        _raise_error(over.end)
        LOG.warning("the run has ended already (%s): this process exits", over)
        raise SystemExit(130 if over.end["outcome"] == Outcome.INTERRUPTED else 0) from None
    _raise_error(end)
    assert isinstance(setting.cluster, Torchrun)
    if setting.cluster.ranks.assistant is not None:
        raise SystemExit(0)  # what comes after the training is for rank 0 itself to do
    return Result(model, History(list), end["time_s"], Outcome(end["outcome"]), end["reason"])


def _raise_error(end: Mapping[str, Any]) -> None:
    """Raise the error that ended the run of rank 0, if one has."""
    if "error" in end:
        raise (UsageError if end["is_usage"] else RunError)(f"rank 0: {end['error']}")


def _run(
    session: Session,
    folder: RunFolder | None,
    past: Resumption | None,
    callbacks: Sequence[Callback],
    habit: CheckpointPolicy,
) -> Result:
    memory = Memory()
    log = RunLog(is_simulated=isinstance(session.setting.cluster, Cluster))
    recorder = session.recorder([folder or memory, log, *callbacks])
    try:
        engine = session.engine()
        first = past.load(engine, recorder) if past else None
        if past is not None and past.kept is not None:
            for callback in callbacks:
                callback.on_resume(past.history())
        keeper = Checkpointer(session, engine, recorder, folder, habit) if folder else None
        with engine:
            end = _carry_out(session.coordinator, engine, recorder, keeper, first)
        recorder.end(end, session.coordinator.version, {} if end.outcome.is_failure else session.evaluate())
    finally:  # whatever ended it, what was learned is kept
        model = session.model.cpu()
        model.zero_grad(set_to_none=True)
        if folder is not None:
            with closing(folder):
                folder.save_model(model.state_dict())
    return Result(
        model=model,
        history=History(lambda: folder.history if folder else memory.records, recorder.totals),
        time_s=recorder.reached_s,
        stopped_by=end.outcome,
        reason=end.reason,
        metrics=recorder.evaluation.metrics if recorder.evaluation else {},
        folder=folder.path if folder else None,
    )


def _carry_out(
    coordinator: Coordinator, engine: Engine, recorder: Recorder, keeper: Checkpointer | None, first: Event | None
) -> EndCommand:
    """Run to the end, with a checkpoint now and then if there is a keeper."""
    if keeper is None:
        return engine.run(coordinator, recorder.observe, first)

    def observe(now: float, event: Event | None, commands: Sequence[Command]) -> None:
        recorder.observe(now, event, commands)
        keeper.after()

    end = engine.run(coordinator, observe, first)
    keeper.at_end()
    return end


def _extent(given: str | Duration) -> Duration:
    return Duration.parse(given) if isinstance(given, str) else given
