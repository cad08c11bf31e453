"""Simulated runs without gradients, with the records of a run, for tests of what needs only the times."""

from types import SimpleNamespace

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.engines.virtual.timing import TimedWorkers
from paceline.recording.callback import Memory
from paceline.recording.recorder import Recorder
from paceline.run.config import RunConfig
from tiny_jobs import tiny_job


def timed_run(protocol, cluster, stop, worker_timeout_s=None, seed=0):
    """Return the history and the end of a run as `pl.train` makes it, whose gradients are not computed."""
    config = RunConfig(
        job=tiny_job(),
        plan=parse_plan(protocol),
        cluster=cluster,
        stop=pl.Stop.parse(stop),
        seed=seed,
        evaluate_every=None,
        worker_timeout_s=worker_timeout_s,
    )
    memory = Memory()
    recorder = Recorder(cluster.n, config.job.batch_size, "", lambda: 0.1, [memory])
    with TimedWorkers(cluster, seed).loop() as loop:
        end = loop.run(config.rules.coordinator(config.checked_plan, config.stop), recorder.observe)
    history = pl.results.History(lambda: memory.records, recorder.totals)
    return SimpleNamespace(history=history, time_s=recorder.reached_s, stopped_by=end.outcome, reason=end.reason)
