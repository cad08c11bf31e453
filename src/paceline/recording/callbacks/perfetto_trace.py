"""A run as a timeline in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isnan
from os import SEEK_END
from pathlib import Path
from typing import Any

import orjson

from paceline.core.records import (
    DecisionMade,
    GradientArrived,
    Record,
    RunEnded,
    RunStarted,
    UpdateMade,
    WorkerJoined,
    WorkerLost,
    WorkInterrupted,
    WorkUnfinished,
)
from paceline.errors import RunError
from paceline.recording.callback import Callback
from paceline.utils.argument_types import checked_types
from paceline.utils.files import create_file, open_to_extend

SERVER = 0  # its track; worker w has track w + 1
HELD = 100  # pieces of abandoned work of a worker that may yet arrive
MICROSECONDS = 1e6

Trace = dict[str, Any]
Abandoned = WorkInterrupted | WorkUnfinished


@checked_types
class PerfettoTrace(Callback):
    """Writes one track a worker, with its work; one of the server, with its updates; and k and the loss over time.

    Work that was given to a worker while it was still busy with what had been interrupted begins after that.
    The file is written as the run goes on. One that a crash cut short can be opened too: Chrome's format allows
    that the closing bracket is missing. That of a run that has ended is whole JSON.

    Args:
        path: of the file; one that is there already is replaced when the run begins.

    Raises:
        RunError: while running, when nothing more can be written.

    Source: Google, "Trace Event Format", the JSON array format.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._waiting: list[Trace] = []
        self._has_written = False
        self._named: set[int] = set()
        self._busy_until_s: dict[int, float] = defaultdict(float)
        self._abandoned: dict[int, list[Abandoned]] = defaultdict(list)

    def on_resume(self, records: Iterable[Record]) -> None:
        """Write the file anew with what had happened before."""
        for record in records:
            if not isinstance(record, RunEnded):
                self.on_record(record)

    def on_record(self, record: Record) -> None:
        """Write what is known for certain."""
        self._waiting += self._traces(record)
        try:
            if isinstance(record, UpdateMade | RunEnded):
                self._write_out(end=b"\n]\n" if isinstance(record, RunEnded) else b"")
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}; the run stopped, and what was written before is kept"
            ) from error

    def _traces(self, record: Record) -> Iterator[Trace]:
        match record:
            case RunStarted():
                yield _metadata("process_name", SERVER, name="paceline")
                yield from self._name(SERVER)
                for worker in range(record.workers):
                    yield from self._name(worker + 1)
            case GradientArrived():
                yield from self._settle(record)
                yield from self._work(record, *_outcome(record))
            case WorkInterrupted() | WorkUnfinished():
                yield from self._hold(record)
            case UpdateMade():
                yield _instant(record, SERVER, "update", version=record.version, k=record.k, reason=record.reason)
                yield _counter(record, "k", record.k)
                if not isnan(record.loss):
                    yield _counter(record, "loss", record.loss)
            case DecisionMade():
                yield _instant(record, SERVER, record.kind, reason=record.reason, worker=record.worker, k=record.k)
            case WorkerJoined():
                yield from self._name(record.worker + 1)
                yield _instant(record, record.worker + 1, "joined")
            case WorkerLost():
                yield _instant(record, record.worker + 1, "lost", reason=record.reason)
            case RunEnded():
                for work in chain.from_iterable(self._abandoned.values()):
                    yield from self._given_up(work)
                yield _instant(record, SERVER, "end", outcome=record.outcome, reason=record.reason)

    def _hold(self, work: Abandoned) -> Iterator[Trace]:
        """Wait with abandoned work: its gradient may cross the interrupt and arrive all the same."""
        held = self._abandoned[work.worker]
        held.append(work)
        if len(held) > HELD:
            yield from self._given_up(held.pop(0))

    def _settle(self, arrival: GradientArrived) -> Iterator[Trace]:
        """Write the abandoned work that will not arrive any more, since a worker's gradients come in order."""
        held = self._abandoned[arrival.worker]
        for work in held:
            if work.draw < arrival.draw:
                yield from self._given_up(work)
        held[:] = [work for work in held if work.draw > arrival.draw]

    def _given_up(self, work: Abandoned) -> Iterator[Trace]:
        name = "interrupted" if isinstance(work, WorkInterrupted) else "unfinished"
        return self._work(work, name, {"draw": work.draw, "version": work.version})

    def _work(self, work: Abandoned | GradientArrived, name: str, args: Trace) -> Iterator[Trace]:
        yield from self._name(work.worker + 1)
        start_s = max(work.started_s, self._busy_until_s[work.worker])
        self._busy_until_s[work.worker] = max(start_s, work.now_s)
        yield _complete(work.worker + 1, name, "work", start_s, work.now_s, args)
        if isinstance(work, GradientArrived):
            yield from _parts(work, start_s)

    def _name(self, track: int) -> Iterator[Trace]:
        if track not in self._named:
            self._named.add(track)
            yield _metadata("thread_name", track, name="server" if track == SERVER else f"worker {track - 1}")
            yield _metadata("thread_sort_index", track, sort_index=track)

    def _write_out(self, end: bytes) -> None:
        """Write whole events in one go, so that a crash leaves no half of one."""
        if not self._has_written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = b",\n".join(map(orjson.dumps, self._waiting))
        with open_to_extend(self._path) if self._has_written else create_file(self._path) as file:
            file.seek(0, SEEK_END)
            file.write((b",\n" if self._has_written else b"[\n") + lines + end)
        self._has_written = True
        self._waiting.clear()


def _outcome(arrival: GradientArrived) -> tuple[str, Trace]:
    name = "interrupted" if arrival.crossed_interrupt else "used" if arrival.used else "dropped"
    args = {
        "draw": arrival.draw,
        "version": arrival.version,
        "staleness": arrival.staleness,
        "reason": arrival.reason,
        "loss": arrival.loss,
    }
    return name, args


def _parts(arrival: GradientArrived, begun_s: float) -> Iterator[Trace]:
    """Yield the parts of a round trip that are known, which ends with the arrival."""
    end_s = arrival.now_s
    for name, seconds in (("push", arrival.push_s), ("compute", arrival.compute_s), ("pull", arrival.pull_s)):
        start_s = max(begun_s, end_s - seconds)
        if start_s < end_s:
            yield _complete(arrival.worker + 1, name, "part", start_s, end_s, {})
        end_s = start_s


def _complete(track: int, name: str, category: str, start_s: float, end_s: float, args: Trace) -> Trace:
    times = {"ts": start_s * MICROSECONDS, "dur": max(0.0, end_s - start_s) * MICROSECONDS}
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "cat": category, **times, "args": args}


def _instant(record: Record, track: int, name: str, **args: object) -> Trace:
    where = {"pid": 0, "tid": track, "ts": record.now_s * MICROSECONDS}
    return {"ph": "i", "s": "t", **where, "name": name, "args": args}


def _counter(record: Record, name: str, value: float) -> Trace:
    return {"ph": "C", "pid": 0, "ts": record.now_s * MICROSECONDS, "name": name, "args": {name: value}}


def _metadata(kind: str, track: int, **args: object) -> Trace:
    return {"ph": "M", "pid": 0, "tid": track, "name": kind, "args": args}
