"""Runs for tests of the report: trained ones, and ones with invented records."""

from pathlib import Path

import paceline as pl
from paceline.core.events import Outcome
from paceline.core.records import GradientArrived, RunEnded, RunStarted, UpdateMade
from paceline.recording.run_folder import RunFolder, SavedRun
from paceline.recording.schema import SCHEMA
from tiny_jobs import dataset, tiny_job

CONFIGURATION = {
    "schema": SCHEMA,
    "job": "made up",
    "protocol": "bsp",
    "cluster": "2*exp(mean=1)",
    "seed": 0,
    "batch_size": 8,
    "workers": 2,
    "parameters": 3,
}


def small_job():
    return tiny_job(eval_data=dataset(16))


def exponential(workers=4):
    return pl.Cluster(workers, pl.timing.Exponential(mean_s=1.0))


def train_run(path: Path, protocol="k_sync(k=3)", seed=0, updates=30, **options) -> SavedRun:
    settings = {"cluster": exponential(), "stop": pl.Stop(updates=updates), "evaluate_every": "updates=10", **options}
    pl.train(small_job(), protocol=protocol, seed=seed, out=path, **settings)
    return SavedRun(path)


def write_run(path: Path, records, **changes) -> SavedRun:
    folder = RunFolder(path, {**CONFIGURATION, **changes})
    for record in records:
        folder.on_record(record)
    folder.close()
    return SavedRun(path)


def arrival(worker, draw, started_s, now_s, **changes):
    fields = {
        "version": 0,
        "staleness": 0,
        "used": True,
        "reason": "",
        "loss": 1.0,
        "samples": 8,
        "squared_norm": 1.0,
        "pull_s": 0.0,
        "compute_s": now_s - started_s,
        "push_s": 0.0,
        **changes,
    }
    return GradientArrived(now_s=now_s, worker=worker, draw=draw, started_s=started_s, **fields)


def update(version, now_s, k=2, loss=1.0, workload=None, reason="quorum of 2 reached"):
    return UpdateMade(
        now_s=now_s,
        version=version,
        k=k,
        workload=workload or k * version,
        samples=8 * k,
        loss=loss,
        learning_rate=0.1,
        staleness=0.0,
        max_staleness=0,
        reason=reason,
        busy_s=now_s,
        live_s=2 * now_s,
    )


def begun(workers=2):
    return RunStarted(0.0, workers, "little memory")


def ended(now_s, live_s):
    return RunEnded(now_s=now_s, outcome=Outcome.UPDATES, reason="updates made", busy_s=now_s, live_s=live_s)


def two_updates(loss=1.0, **changes):
    """Records of a whole run: two workers, two updates of two gradients each."""
    changes = {"loss": loss, **changes}
    return [
        begun(),
        arrival(0, 1, 0.0, 1.0, **changes),
        arrival(1, 1, 0.0, 2.0, **changes),
        update(1, 2.0, loss=loss),
        arrival(1, 2, 2.0, 3.0, **changes),
        arrival(0, 2, 2.0, 4.0, **changes),
        update(2, 4.0, loss=loss),
        ended(4.0, live_s=8.0),
    ]
