"""Tasks: each is done once, several at a time, and written down when it has ended."""

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
    """What a task needs to know and its result does not depend on, but for `updates`.

    Args:
        folder: of the data set.
        device: "cpu" or "cuda".
        updates: after which every run ends, to try something out.
    """

    folder: Path
    device: str = "cpu"
    updates: int | None = None


class Task(Protocol):
    """A piece of work that a store keeps one line of."""

    def asked(self) -> Line:
        """Return everything that its result depends on."""

    def carry_out(self, where: Where) -> Line:
        """Do it, and return the line."""


def unbroken(result: pl.Result) -> pl.Result:
    """Return a run that came to its own end; one that a signal ended must not stand among the results."""
    if result.stopped_by is pl.Outcome.INTERRUPTED:
        raise KeyboardInterrupt
    return result


def carry_out(tasks: Sequence[Task], where: Where, store: Store, processes: int) -> None:
    """Do the tasks that the store does not hold, each once, and write it down when it is done.

    Args:
        processes: tasks at a time, each with one thread; a single one is done in this process.
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
