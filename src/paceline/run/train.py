"""`train`: one run, from the arguments of the user to its result."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.catalogue.parser import parse_plan
from paceline.clusters.launch_env import ENDED
from paceline.clusters.local import LocalCluster
from paceline.clusters.parser import parse_cluster
from paceline.clusters.ray import Ray
from paceline.clusters.simulated import Cluster
from paceline.clusters.torchrun import Torchrun
from paceline.coordinator.coordinator import Coordinator
from paceline.core.duration import Duration
from paceline.core.events import Command, Event, Outcome
from paceline.core.events import EndRun as EndCommand
from paceline.core.stop import Stop
from paceline.engines.distributed import (
    THIS_PROCESS,
    End,
    FollowedRunEnded,
    Host,
    RunFinished,
    is_restart,
    tell_launcher,
)
from paceline.engines.run import Run
from paceline.engines.signals import holding_sigterm, release_sigterm
from paceline.errors import RunError, UsageError
from paceline.jobs.job import Job
from paceline.processes.shared_pickle import refuse_while_unpickling
from paceline.protocols.protocol import Phase, Plan, Protocol, as_plan
from paceline.recording.callback import Callback, Memory, RunInfo
from paceline.recording.callbacks.progress_line import is_shown, shown, stderr_console
from paceline.recording.history import History
from paceline.recording.recorder import Recorder
from paceline.recording.run_folder import RUN, RunFolder, standby_folder
from paceline.run.checkpointer import Checkpointer, CheckpointPolicy
from paceline.run.config import RunConfig
from paceline.run.result import Result
from paceline.run.resume import Resumption
from paceline.run.run_log import RunLog
from paceline.run.session import Session, take_part
from paceline.run.spawned_sidecar import host_of, spawning_if_needed
from paceline.run.standby import AfterTakeover
from paceline.utils.argument_types import checked_types
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)

AnyProtocol = str | Protocol | Phase | Plan
AnyCluster = str | Cluster | LocalCluster | Torchrun | Ray


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
        job: job to train.
        protocol: protocol such as ``pl.k_sync(k=12)``, a phase, a plan, or its text: "bsp@25% >> asp".
        cluster: simulated `Cluster`, `LocalCluster` of processes, `Torchrun`, `Ray`, or its text: "local:4". Under
            a launcher every rank calls `train` with the same arguments. Rank 0 writes the folder of the run; the result
            of any other rank has the trained model and the reason for the end, and an empty history. After a restart
            by the launcher the run in ``out`` is resumed from its last checkpoint. With Ray the driver alone calls
            `train`.
        stop: conditions that end the run, as ``Stop(loss=0.2)`` or "loss=0.2,seconds=600".
        seed: seed of all random numbers, >= 0.
        out: folder to record the run in; without it nothing is written.
        overwrite: whether to replace an earlier run in that folder.
        resume: folder of a run of the same job to resume, instead of ``out``. A simulated run continues bit for bit as
            if it had not stopped; a real one continues from its last checkpoint.
        allow_change: whether protocol and cluster may differ from those of the resumed run.
        callbacks: callbacks that get each record of the run.
        evaluate_every: interval between evaluations of ``job.eval_data``, as ``Duration("epochs", 1)`` or "epochs=1".
            The default is one epoch, or 100 updates for data without a length.
        checkpoint_every: interval between checkpoints, as "updates=100" or "seconds=60" (real time). A checkpoint is
            also saved at the beginning, after the first update and at the end. Real ranks without a server save it one
            update later, and with `local_sgd` at the first sum or evaluation after the interval.
        keep_checkpoints: number of checkpoints kept, >= 1.
        worker_timeout_s: seconds without an answer after which a worker is lost, > 0. The default is derived from the
            round trips and losses of real workers (``policies.estimators.timeouts.round_trip_timeout``); simulated
            workers then have no timeout.
        measure_steps: whether to record how far each update moves the parameters, which `pl.advise` needs; it costs up
            to three additions of the parameters per update.
        progress: whether to show a progress line on standard error; None for only on a terminal and in a notebook.

    Raises:
        UsageError: the arguments cannot work; nothing has run.
        RunError: the run failed.

    Example:
        >>> import paceline as pl
        >>> result = pl.train(pl.jobs.digits(), protocol="k_sync(k=3)", cluster="4*exp(mean=1)", stop="updates=20")
        >>> result.reason, round(result.time_s, 1)
        ('20 updates made', 22.7)
    """
    given = dict(locals())  # before there are other local names
    refuse_while_unpickling()
    plan = parse_plan(protocol) if isinstance(protocol, str) else as_plan(protocol)
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    stop = Stop.parse(stop) if isinstance(stop, str) else stop
    evaluations = None if evaluate_every is None else _duration(evaluate_every)
    config = RunConfig(
        job=job,
        plan=plan,
        cluster=_fitted(cluster, plan),
        stop=stop,
        seed=seed,
        evaluate_every=evaluations,
        worker_timeout_s=worker_timeout_s,
        measure_steps=measure_steps,
        folder=out if resume is None else resume,
    )
    if isinstance(cluster, Ray):
        return _train_on_ray(cluster, config, given)
    cluster = config.cluster
    host = host_of(config) if isinstance(cluster, Torchrun) else THIS_PROCESS
    if isinstance(cluster, Torchrun) and not cluster.is_server:
        release_sigterm()
        if not cluster.is_standby:
            return join_run(config, host)
    policy = CheckpointPolicy(config.in_gradients(_duration(checkpoint_every)), keep_checkpoints)
    if isinstance(cluster, Torchrun) and cluster.is_standby:
        return stand_by(config, host, out=out, resume=resume, callbacks=callbacks, policy=policy, overwrite=overwrite)
    session, folder, resumption = open_session(
        config, host, out, overwrite=overwrite, resume=resume, allow_change=allow_change
    )
    title = protocol if isinstance(protocol, str) else str(plan)
    with shown(progress, title, stop, stop.workload(config.per_epoch), cluster.n) as line:
        return run_session(session, folder, resumption, [*callbacks, *line], policy)


def _fitted(cluster: Cluster | LocalCluster | Torchrun | Ray, plan: Plan) -> Cluster | LocalCluster | Torchrun:
    """Return the cluster with the number of workers that a plan uses; for Ray, as its rank 0 sees it."""
    if isinstance(cluster, Torchrun):
        cluster = spawning_if_needed(cluster)
    return cluster.fitted_to(plan) if isinstance(cluster, Torchrun | Ray) else cluster


def _train_on_ray(cluster: Ray, config: RunConfig, given: Mapping[str, Any]) -> Result:
    """Train in actors of Ray, each of which calls `train` with the given arguments and its own launch settings."""
    if find_spec("ray") is None:
        raise UsageError("ray is not installed; run: pip install 'paceline[ray]'")
    from paceline.run.ray_actors import train_on_ray  # which imports ray

    folders = {name: given[name] and Path(given[name]).absolute() for name in ("out", "resume")}
    progress = is_shown(given["progress"], stderr_console())
    arguments = {name: value for name, value in given.items() if name != "cluster"}
    return train_on_ray(cluster, config, partial(train, **{**arguments, **folders, "progress": progress}))


def open_session(
    config: RunConfig,
    host: Host,
    out: str | Path | None,
    *,
    overwrite: bool = False,
    resume: str | Path | None = None,
    allow_change: bool = False,
) -> tuple[Session, RunFolder | None, Resumption | None]:
    """Return the session of a run, its folder, and the run to resume; the arguments are those of `train`.

    Raises:
        UsageError: the arguments contradict each other, or the run in a folder cannot be resumed.
    """
    if resume is None and out is not None and is_restarted(config.cluster, Path(out)):
        out, resume = None, out
    session = Session(config, host)
    if resume is None:
        folder = RunFolder(Path(out), session.configuration, overwrite=overwrite) if out is not None else None
        return session, folder, None
    if out is not None:
        raise UsageError(
            f"out={str(out)!r} and resume={str(resume)!r}: a resumed run stays in its folder; give only one of them"
        )
    resumption = Resumption(Path(resume), session, allow_change)
    return session, RunFolder(Path(resume), session.configuration, overwrite=True, keep=resumption.kept), resumption


def is_restarted(cluster: AnyCluster, out: Path, *, begins: bool = True) -> bool:
    """Return whether torchrun has restarted the ranks since the run in this folder started.

    Args:
        cluster: cluster of the run.
        out: folder of the run.
        begins: whether the run begins now, which is recorded.
    """
    if not isinstance(cluster, Torchrun):
        return False
    return is_restart(cluster, str(out.resolve()), begins=begins) and (out / RUN).exists()


def join_run(config: RunConfig, host: Host) -> Result:
    """Take part in the run of rank 0 until it ends."""
    try:
        model, end = take_part(config, host)
    except RunFinished as finished:
        _raise_error(finished.end)
        LOG.warning("the run has ended already (%s): this process exits", finished)
        raise SystemExit(130 if finished.end.outcome == Outcome.INTERRUPTED else 0) from None
    _raise_error(end)
    assert isinstance(config.cluster, Torchrun)
    if config.cluster.ranks.sidecar is not None:
        raise SystemExit(0)  # what comes after the training is for rank 0 itself to do
    return Result(
        model=model, history=History(list), time_s=end.time_s, stopped_by=Outcome(end.outcome), reason=end.reason
    )


def stand_by(
    config: RunConfig,
    host: Host,
    *,
    out: str | Path | None,
    resume: str | Path | None,
    callbacks: Sequence[Callback],
    policy: CheckpointPolicy,
    overwrite: bool = False,
    has_loops: bool = False,
) -> Result:
    """Follow the run of rank 0, and go on with it if rank 0 is lost; the arguments are those of `run_session`.

    Raises:
        UsageError: there is a folder that another standby has left.
        FollowedRunEnded: the run of rank 0 has ended.
    """
    given = out if resume is None else resume
    own = None if given is None else standby_folder(Path(given))
    if own is not None and os.path.lexists(own) and not overwrite:
        raise UsageError(
            f"{own} exists already, and may have a run with which another standby has gone on: resume that run, or "
            "remove the folder"
        )
    if resume is not None and own is not None:
        shutil.copytree(resume, own, dirs_exist_ok=True)
    session = Session(config, host)
    resumption = Resumption(own, session, allow_change=True) if resume is not None and own is not None else None
    kept = resumption.kept if resumption is not None else None
    folder = None if own is None else RunFolder(own, session.configuration, overwrite=True, keep=kept)
    try:
        later = AfterTakeover(callbacks, folder, resumes=resumption is not None)
        return run_session(session, folder, resumption, [later], policy, has_loops=has_loops)
    except FollowedRunEnded:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        raise


def _raise_error(end: End) -> None:
    """Raise the error that ended the run of rank 0, if one has."""
    if end.has_failed:
        raise (UsageError if end.is_usage else RunError)(f"rank 0: {end.reason}")


def run_session(
    session: Session,
    folder: RunFolder | None,
    resumption: Resumption | None,
    callbacks: Sequence[Callback],
    policy: CheckpointPolicy,
    *,
    has_loops: bool = False,
) -> Result:
    """Run to the end on rank 0, or without ranks.

    Args:
        session: parts of the run.
        folder: folder to record the run in, None for no folder.
        resumption: saved run to continue, None for a new run.
        callbacks: callbacks that get each record of the run.
        policy: when checkpoints are saved.
        has_loops: whether the workers run loops of the user.
    """
    with ExitStack() as opened:
        for callback in callbacks:
            opened.callback(callback.close)
        log = RunLog(is_simulated=isinstance(session.config.cluster, Cluster), has_loops=has_loops)
        return _run_session(
            session=session, folder=folder, resumption=resumption, callbacks=callbacks, log=log, policy=policy
        )


def _run_session(
    session: Session,
    folder: RunFolder | None,
    resumption: Resumption | None,
    callbacks: Sequence[Callback],
    log: RunLog,
    policy: CheckpointPolicy,
) -> Result:
    memory = Memory()
    cluster = session.config.cluster
    if isinstance(cluster, Torchrun):
        tell_launcher(cluster, ENDED, holds=False)  # an earlier run of the script may have ended
    recorder = session.recorder([folder or memory, log, *callbacks])
    try:
        engine = session.engine()
        first = resumption.load(engine, recorder) if resumption else None
        for callback in callbacks:
            callback.on_start(RunInfo(session.configuration, recorder.totals, engine.network))
        if resumption is not None and resumption.kept is not None:
            for callback in callbacks:
                callback.on_resume(resumption.history())
        checkpointer = Checkpointer(session, engine, recorder, folder, policy) if folder else None
        with resumption.doubted() if resumption else nullcontext():
            with engine:
                end = _carry_out(session.coordinator, engine, recorder, checkpointer, first)
            recorder.end(end, session.coordinator.version, {} if end.outcome.is_failure else session.evaluate())
        if isinstance(cluster, Torchrun) and not (end.outcome.is_crash or end.outcome is Outcome.INTERRUPTED):
            tell_launcher(cluster, ENDED)
    finally:  # save the model also after a failure
        model = session.model.cpu()
        model.zero_grad(set_to_none=True)
        if folder is not None:
            with closing(folder):
                if session.has_whole_model:
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
    coordinator: Coordinator,
    engine: Run,
    recorder: Recorder,
    checkpointer: Checkpointer | None,
    first: Event | None,
) -> EndCommand:
    """Run to the end, with periodic checkpoints if the run has a folder."""
    if checkpointer is None:
        return engine.run(coordinator, recorder.observe, first)

    def observe(now: float, event: Event | None, commands: Sequence[Command]) -> None:
        recorder.observe(now, event, commands)
        checkpointer.after()

    end = engine.run(coordinator, observe, first)
    checkpointer.at_end()
    return end


def _duration(given: str | Duration) -> Duration:
    return Duration.parse(given) if isinstance(given, str) else given
