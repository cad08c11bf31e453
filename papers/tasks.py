"""Tasks of a figure: each runs once, several in parallel, and is saved when it ends."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

import paceline as pl
from papers.store import Line, Store, key


@dataclass(frozen=True)
class Where:
    """Environment of a task; its result depends only on `updates`.

    Args:
        folder: folder of the data set.
        device: "cpu" or "cuda".
        updates: number of updates after which every run ends, for trials, >= 1; None for the figure's own stop.
    """

    folder: Path
    device: str = "cpu"
    updates: int | None = None


class Task(Protocol):
    """Piece of work with one result line in a store."""

    def asked(self) -> Line:
        """Return all settings that its result depends on."""

    def carry_out(self, where: Where) -> Line:
        """Run the task and return its line."""


def unbroken(result: pl.results.Result) -> pl.results.Result:
    """Return the result of a completed run; raise KeyboardInterrupt if a signal ended the run."""
    if result.stopped_by is pl.results.Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return result


def carry_out(tasks: Sequence[Task], where: Where, store: Store, processes: int) -> None:
    """Run the tasks that the store does not hold, each once, and save each when it is done.

    Args:
        processes: number of parallel tasks, >= 1, each with one thread; 1 runs them in this process.
    """
    done = store.done()
    waiting = list({name: task for task in tasks if (name := key(task.asked())) not in done}.values())
    for line in map(_timed, waiting, repeat(where)) if processes == 1 else _in_processes(waiting, where, processes):
        store.add(line)
        print(_summary(line), flush=True)


def _in_processes(tasks: Sequence[Task], where: Where, processes: int) -> Iterator[Line]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in as_completed([pool.submit(_timed, task, where) for task in tasks]):
            yield future.result()


def _timed(task: Task, where: Where) -> Line:
    began = perf_counter()
    return {"asked": task.asked(), **task.carry_out(where), "took_s": round(perf_counter() - began, 1)}


def _summary(line: Line) -> str:
    asked = "  ".join(
        str(line["asked"][name])
        for name in ("figure", "case", "law", "pixels", "series", "seed")
        if name in line["asked"]
    )
    end = f": {line['time_s']:.1f} s, {line['updates']} updates of {line['mean_k']:.1f}" if "time_s" in line else ""
    return f"{asked}{end} ({line['took_s']:.0f} s)"
