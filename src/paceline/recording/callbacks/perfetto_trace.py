"""Timeline of a run in Chrome's trace format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from math import isnan
from os import SEEK_END
from pathlib import Path
from typing import Any

import orjson

from paceline.core import records
from paceline.recording.callback import KEPT, Callback
from paceline.utils.argument_types import checked_types
from paceline.utils.files import create_file, open_to_extend, writing

SERVER = 0  # track of the server; worker w has track w + 1
HELD = 100  # interrupted tasks kept per worker, whose gradients may still arrive
MICROSECONDS = 1e6

Trace = dict[str, Any]
Unused = records.WorkInterrupted | records.WorkUnfinished


@checked_types
class PerfettoTrace(Callback):
    """Callback that writes a timeline: tracks of the workers' tasks and of the server's updates, and k and the loss.

    A task assigned while the worker is still busy with an interrupted one starts after it. The file is written during
    the run. After a crash it can still be opened, because Chrome's format does not need the closing bracket; after the
    end of a run it is complete JSON.

    Args:
        path: file to write; an existing one is replaced at the start of the run.

    Raises:
        RunError: the file cannot be written during the run.

    Source: Google, "Trace Event Format", the JSON array format.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._waiting: list[Trace] = []
        self._has_written = False
        self._named: set[int] = set()
        self._busy_until_s: dict[int, float] = defaultdict(float)
        self._held: dict[int, list[Unused]] = defaultdict(list)

    def on_resume(self, history: Iterable[records.Record]) -> None:
        """Write the earlier records to a new file."""
        for record in history:
            if not isinstance(record, records.RunEnded):
                self.on_record(record)

    def on_record(self, record: records.Record) -> None:
        """Write the events that later records cannot change."""
        self._waiting += self._traces(record)
        if isinstance(record, records.UpdateMade | records.RunEnded):
            with writing(self._path, KEPT):
                self._write_out(end=b"\n]\n" if isinstance(record, records.RunEnded) else b"")

    def _traces(self, record: records.Record) -> Iterator[Trace]:
        match record:
            case records.RunStarted():
                yield _metadata("process_name", SERVER, name="paceline")
                yield from self._name(SERVER)
                for worker in range(record.workers):
                    yield from self._name(worker + 1)
            case records.GradientArrived():
                yield from self._settle(record)
                name, args = _outcome(record)
                yield from self._work(record, name, args)
            case records.WorkInterrupted() | records.WorkUnfinished():
                yield from self._hold(record)
            case records.UpdateMade():
                yield _instant(record, SERVER, "update", version=record.version, k=record.k, reason=record.reason)
                yield _counter(record, "k", record.k)
                if not isnan(record.loss):
                    yield _counter(record, "loss", record.loss)
            case records.DecisionMade():
                yield _instant(record, SERVER, record.kind, reason=record.reason, worker=record.worker, k=record.k)
            case records.WorkerJoined():
                yield from self._name(record.worker + 1)
                yield _instant(record, record.worker + 1, "joined")
            case records.WorkerLost():
                yield _instant(record, record.worker + 1, "lost", reason=record.reason)
            case records.RunEnded():
                for work in chain.from_iterable(self._held.values()):
                    yield from self._interrupted(work)
                yield _instant(record, SERVER, "end", outcome=record.outcome, reason=record.reason)

    def _hold(self, work: Unused) -> Iterator[Trace]:
        """Keep an interrupted task: its gradient may have been sent before the interrupt and still arrive."""
        held = self._held[work.worker]
        held.append(work)
        if len(held) > HELD:
            yield from self._interrupted(held.pop(0))

    def _settle(self, arrival: records.GradientArrived) -> Iterator[Trace]:
        """Write the interrupted tasks before this arrival, whose gradients will not arrive: they arrive in order."""
        held = self._held[arrival.worker]
        for work in held:
            if work.draw < arrival.draw:
                yield from self._interrupted(work)
        held[:] = [work for work in held if work.draw > arrival.draw]

    def _interrupted(self, work: Unused) -> Iterator[Trace]:
        name = "interrupted" if isinstance(work, records.WorkInterrupted) else "unfinished"
        return self._work(work, name, {"draw": work.draw, "version": work.version})

    def _work(self, work: Unused | records.GradientArrived, name: str, args: Trace) -> Iterator[Trace]:
        yield from self._name(work.worker + 1)
        start_s = max(work.started_s, self._busy_until_s[work.worker])
        self._busy_until_s[work.worker] = max(start_s, work.now_s)
        yield _complete(track=work.worker + 1, name=name, category="work", start_s=start_s, end_s=work.now_s, args=args)
        if isinstance(work, records.GradientArrived):
            yield from _parts(work, start_s)

    def _name(self, track: int) -> Iterator[Trace]:
        if track not in self._named:
            self._named.add(track)
            yield _metadata("thread_name", track, name="server" if track == SERVER else f"worker {track - 1}")
            yield _metadata("thread_sort_index", track, sort_index=track)

    def _write_out(self, end: bytes) -> None:
        """Write complete events in one call, so that a crash leaves no partial event."""
        if not self._has_written:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = b",\n".join(map(orjson.dumps, self._waiting))
        with open_to_extend(self._path) if self._has_written else create_file(self._path) as file:
            file.seek(0, SEEK_END)
            file.write((b",\n" if self._has_written else b"[\n") + lines + end)
        self._has_written = True
        self._waiting.clear()


def _outcome(arrival: records.GradientArrived) -> tuple[str, Trace]:
    name = "interrupted" if arrival.crossed_interrupt else "used" if arrival.used else "dropped"
    return name, {shown: getattr(arrival, shown) for shown in ("draw", "version", "staleness", "reason", "loss")}


def _parts(arrival: records.GradientArrived, begin_s: float) -> Iterator[Trace]:
    """Yield the measured parts of a round trip, the last one first."""
    end_s = arrival.now_s
    for name, seconds in (("push", arrival.push_s), ("compute", arrival.compute_s), ("pull", arrival.pull_s)):
        start_s = max(begin_s, end_s - seconds)
        if start_s < end_s:
            yield _complete(track=arrival.worker + 1, name=name, category="part", start_s=start_s, end_s=end_s, args={})
        end_s = start_s


def _complete(track: int, name: str, category: str, start_s: float, end_s: float, args: Trace) -> Trace:
    times = {"ts": start_s * MICROSECONDS, "dur": max(0.0, end_s - start_s) * MICROSECONDS}
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "cat": category, **times, "args": args}


def _instant(record: records.Record, track: int, name: str, **args: object) -> Trace:
    where = {"pid": 0, "tid": track, "ts": record.now_s * MICROSECONDS}
    return {"ph": "i", "s": "t", **where, "name": name, "args": args}


def _counter(record: records.Record, name: str, value: float) -> Trace:
    return {"ph": "C", "pid": 0, "ts": record.now_s * MICROSECONDS, "name": name, "args": {name: value}}


def _metadata(kind: str, track: int, **args: object) -> Trace:
    return {"ph": "M", "pid": 0, "tid": track, "name": kind, "args": args}
