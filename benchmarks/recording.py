"""Cost of recording a run: log, progress line and checkpoints together, in time and in memory.

Time: the MNIST run of `virtual_engine.py`, with the default checkpoints: at the beginning, at the end and every 60 s.
The share is the time in log, progress line and checkpoints, with the processor time of the writing thread, divided by
the wall time. A difference of two runs would vary by 10 % on a shared machine. The ratio to the same run without
recording, in alternating rounds, is reported beside it. Memory: a long run of a small model, whose resident memory is
measured during the run.
"""

from __future__ import annotations

import argparse
import gc
import io
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import psutil
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from common import Stopwatch, options, ratios, report, rounded, spread
from paceline.recording.callbacks.progress_line import ProgressLine
from paceline.recording.event_log import EventLog
from paceline.recording.run_folder import RunFolder
from paceline.run.checkpointer import Checkpointer
from virtual_engine import make_job, mnist_run

BAR = 0.02
GROWTH_BAR_MIB = 2.0
SEED = 0


def main() -> None:
    parser = mnist_run(options(__doc__ or "", rounds=7))
    parser.add_argument("--memory-updates", type=int, default=100_000)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    job = make_job(args.folder, args.batch_size)
    plain_s, written_s, shares = [], [], []
    spent = inside_of_recording()
    run(job, args, None)  # warm-up round
    for _ in range(args.rounds):
        plain_s.append(run(job, args, None))
        with tempfile.TemporaryDirectory() as folder:
            spent.calls_s.clear()
            written_s.append(run(job, args, Path(folder) / "run"))
            shares.append(spent.s / written_s[-1])
    share, ratio = spread(shares), ratios(written_s, plain_s)
    memory_mib = resident_memory_mib(args.memory_updates)
    growth_mib = memory_mib[-1] - memory_mib[1]
    report(
        "recording",
        args,
        {
            "bar": f"at most {BAR:.0%} of the wall time; memory flat after the first tenth "
            f"(at most {GROWTH_BAR_MIB} MiB more)",
            "data": job.name,
            "plain_s": spread(plain_s),
            "written_s": spread(written_s),
            "share": {**share, "meets_bar": share["median"] <= BAR},
            "ratio": ratio,
            "resident_mib_at_each_tenth": [rounded(each) for each in memory_mib],
            "growth_mib": rounded(growth_mib),
            "memory_is_flat": growth_mib <= GROWTH_BAR_MIB,
        },
    )


def run(job: pl.Job, args: argparse.Namespace, folder: Path | None) -> float:
    """Return the seconds of one run."""
    stop = pl.Stop(updates=args.updates)
    train = partial(
        pl.train,
        job,
        protocol=pl.k_sync(k=args.k),
        cluster=pl.Cluster(args.n, pl.timing.Exponential(mean_s=1.0)),
        stop=stop,
        seed=SEED,
        progress=False,  # the line is discarded
    )
    begun = perf_counter()
    if folder is None:
        train()
    else:
        with ProgressLine("k_sync", stop, terminal()) as progress:
            train(out=folder, callbacks=[progress])
    return perf_counter() - begun


def inside_of_recording() -> Stopwatch:
    """Return stopwatches for the wall time of the run's thread and the processor time of the writing thread."""
    watch = Stopwatch()
    own: list[tuple[type[Any], str]] = [
        (RunFolder, "__init__"),
        (RunFolder, "on_record"),
        (RunFolder, "save_model"),
        (RunFolder, "close"),
        (ProgressLine, "on_record"),
        (Checkpointer, "after"),
        (Checkpointer, "at_end"),
    ]
    for kind, name in own:
        watch.time(kind, name)
    watch.time(EventLog, "_write", thread_time)
    return watch


class Memory(pl.callbacks.Callback):
    """Callback that measures the resident memory at every tenth of a run."""

    def __init__(self, updates: int) -> None:
        self.mib: list[float] = []
        self._every = updates // 10

    def on_update(self, update: pl.callbacks.UpdateMade) -> None:
        if update.version % self._every == 0:
            gc.collect()
            self.mib.append(psutil.Process().memory_info().rss / 2**20)


def resident_memory_mib(updates: int) -> list[float]:
    """Return the resident memory at every tenth of a long run."""
    generator = torch.Generator().manual_seed(SEED)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(2, (64,), generator=generator))
    job = pl.Job(
        model=partial(nn.Linear, 4, 2),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        data=data,
        batch_size=2,
        sampling="epoch",
    )
    stop = pl.Stop(updates=updates)
    memory = Memory(updates)
    with tempfile.TemporaryDirectory() as folder, ProgressLine("asp", stop, terminal()) as progress:
        cluster = pl.Cluster(4, pl.timing.Exponential(mean_s=1.0))
        pl.train(
            job,
            protocol=pl.asp(),
            cluster=cluster,
            stop=stop,
            out=Path(folder) / "run",
            callbacks=[progress, memory],
            checkpoint_every="seconds=5",
            progress=False,
        )
    return memory.mib


def terminal() -> Console:
    """Return a console that draws as on a terminal and discards its output."""
    return Console(file=io.StringIO(), force_terminal=True, width=80)


if __name__ == "__main__":
    main()
