"""A DDP recording as a run, so that the report shows it as it shows runs."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Outcome
from paceline.core.records import GradientArrived, Record, RunEnded, RunStarted, UpdateMade
from paceline.ddp_recording.recording import DDPRecording
from paceline.recording.history import History
from paceline.recording.run_folder import SavedRun
from paceline.recording.validation import Configuration

LOSS = "sampled, linear between two samples"


class RecordedDDPRun(SavedRun):
    """Reader of a DDP recording with the interface of a run: each step is an update of all ranks' gradients.

    The time of a step after the own work of a rank and the communication is its waiting, which a report shows as idle.

    Args:
        path: folder of the recording.

    Attributes:
        recording: recording behind the records.

    Raises:
        UsageError: the folder has no complete recording.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recording = read = DDPRecording(path)
        first = read.headers[0]
        facts = {
            "job": "DDP recording",
            "protocol": "DDP",
            "seed": "-",
            "cluster": f"{len({header.host for header in read.headers})} hosts",
            "workers": read.ranks,
            "hosts": [header.host for header in read.headers],
            "batch_size": first.batch_size,
            "parameters": sum(model.parameters for model in first.models),
            "bucket_bytes": [size for model in first.models for size in model.bucket_bytes],
            "backend": first.backend,
            "torch": first.torch,
            "optimizer": first.optimizer and first.optimizer.name,
            "loss": LOSS,
        }
        self.configuration = Configuration(facts, str(path))
        self.history = History(lambda: _records(self.recording))


def _records(recording: DDPRecording) -> Iterator[Record]:
    """Yield the records: a gradient arrives after the own work of its rank and the communication of the step."""
    n, steps = recording.ranks, recording.steps
    losses = _losses(recording)
    samples = recording.headers[0].batch_size or 1
    network_s = recording.sum_s + recording.part_s("collectives").min(axis=0)
    busy_s = start_s = 0.0
    yield RunStarted(0.0, n, "")
    for step, length_s in enumerate(recording.step_s.mean(axis=0).tolist()):
        end_s = start_s + length_s
        works_s = recording.work_s[:, step].tolist()
        push_s, loss = float(network_s[step]), float(losses[step])
        for worker in sorted(range(n), key=lambda rank: works_s[rank]):
            taken_s = min(works_s[worker] + push_s, length_s)
            busy_s += taken_s
            now_s = start_s + taken_s
            yield GradientArrived(
                now_s=now_s,
                worker=worker,
                draw=step + 1,
                version=step,
                started_s=start_s,
                staleness=0,
                used=True,
                reason="",
                loss=loss,
                samples=samples,
                squared_norm=nan,
                pull_s=0.0,
                compute_s=works_s[worker],
                push_s=push_s,
                event_s=now_s,
            )
        yield UpdateMade(
            now_s=end_s,
            version=step + 1,
            k=n,
            workload=n * (step + 1),
            samples=n * samples,
            loss=loss,
            learning_rate=nan,
            staleness=0.0,
            max_staleness=0,
            reason="all ranks are done",
            busy_s=busy_s,
            live_s=n * end_s,
        )
        start_s = end_s
    yield RunEnded(
        now_s=start_s,
        outcome=Outcome.UPDATES,
        reason=f"the recording ends with {steps} steps",
        busy_s=busy_s,
        live_s=n * start_s,
    )


def _losses(recording: DDPRecording) -> NDArray[np.float64]:
    """Return the loss of each step, linear between two samples; nan without samples."""
    known = [(each.step, each.loss) for each in recording.gradient_samples if not isnan(each.loss)]
    if not known:
        return np.full(recording.steps, nan)
    at, loss = zip(*known, strict=True)
    losses: NDArray[np.float64] = np.interp(recording.step_numbers, at, loss)
    return losses
