"""One process that `transport.py` measures: the server, or a worker, over a connection of a given kind.

Called with what it does and its settings as JSON; every process prints its answer as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

import gloo_lines
from distributed_ranks import ANSWER
from gloo_lines import GlooLine
from paceline.core.events import Measured
from paceline.engines.distributed.transport import task_messages
from paceline.engines.distributed.transport.buckets import make_buckets
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.security import Security, TokenSecurity
from paceline.engines.distributed.transport.tls import TLSSecurity, derive_identity
from paceline.engines.distributed.transport.transport import Transport

LIMIT_S = 60.0
HEARTBEAT_TIMEOUT_S = 60.0
STATS = Measured(loss=0.5, samples=8, squared_norm=1.0, variance=0.1, finite=True, compute_s=0.1)
INTERRUPT_AFTER_S, INTERRUPT_EVERY_S = 0.5, 0.3


def main() -> None:
    torch.set_num_threads(1)
    settings = json.loads(sys.argv[2])
    kind: Lines = GlooLines(settings) if settings["kind"] == "gloo" else OurLines(settings)
    is_server = os.environ["RANK"] == "0"
    act = CONTENDERS[sys.argv[1]][0 if is_server else 1]
    lines = kind.accept(int(os.environ["WORLD_SIZE"]) - 1) if is_server else [kind.connect()]
    print(ANSWER + json.dumps(act(kind, lines, settings)), flush=True)
    for line in lines:
        line.close()
    kind.close()
    os._exit(0)  # gloo aborts a process whose threads still wait


# --- connections of both kinds ---------------------------------------------------------------------------------------


class Line(Protocol):
    """What both kinds of connections can do."""

    def send(self, message: Any, buckets: Sequence[tuple[int, Tensor]] = ()) -> None: ...
    def post_buckets(self, buffers: Sequence[Tensor]) -> None: ...
    def close(self) -> None: ...


class Lines(Protocol):
    """A kind of connections, and its messages."""

    def accept(self, count: int) -> list[Any]: ...
    def connect(self) -> Any: ...
    def listen(self, line: Any, on_message: Callable[[Any], None]) -> None: ...
    def close(self) -> None: ...
    def task(self, draw: int) -> Any: ...
    def done(self, draw: int) -> Any: ...
    def received(self, draw: int) -> Any: ...
    def cancel(self, draw: int) -> Any: ...


class GlooLines:
    """Gloo groups of two that meet in a TCPStore of the server."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._address = settings["server"]
        self._host = settings["hosts"][int(os.environ["RANK"])]

    def accept(self, count: int) -> list[GlooLine]:
        self._store = self._open_store(is_server=True)
        return [GlooLine(self._open_store(), f"line/{number + 1}", 0, self._host) for number in range(count)]

    def connect(self) -> GlooLine:
        return GlooLine(self._open_store(), f"line/{os.environ['RANK']}", 1, self._host)

    def listen(self, line: GlooLine, on_message: Callable[[Any], None]) -> None:
        line.listen(on_message)

    def close(self) -> None:
        pass

    def task(self, draw: int) -> gloo_lines.RemoteTask:
        return gloo_lines.RemoteTask(draw=draw, version=draw, sends_version=True, run_s=0.5)

    def done(self, draw: int) -> gloo_lines.RemoteTaskDone:
        return gloo_lines.RemoteTaskDone(draw, 0, 0.1, *STATS[:6])

    def received(self, draw: int) -> gloo_lines.GradientReceived:
        return gloo_lines.GradientReceived(1, draw)

    def cancel(self, draw: int) -> gloo_lines.CancelTask:
        return gloo_lines.CancelTask(draw)

    def _open_store(self, *, is_server: bool = False) -> Any:
        host, port = self._address
        return gloo_lines.dist.TCPStore(host, port, None, is_server, timedelta(seconds=LIMIT_S), wait_for_workers=False)


class OurLines:
    """Connections of paceline."""

    def __init__(self, settings: dict[str, Any]) -> None:
        identity = derive_identity("benchmark") if settings["kind"] == "tls" else None
        security: Security = TLSSecurity(identity) if identity else TokenSecurity("benchmark")
        self._transport = Transport(lambda: security, "benchmark", HEARTBEAT_TIMEOUT_S)
        host, port = settings["server"]
        self._address: tuple[str, int] = host, port

    def accept(self, count: int) -> list[Connection]:
        connections: list[Connection] = []
        all_are_there = threading.Event()

        def on_connection(connection: Connection) -> None:
            connections.append(connection)
            if len(connections) == count:
                all_are_there.set()

        self._transport.listen(*self._address, on_connection, print)
        wait(all_are_there)
        return connections

    def connect(self) -> Connection:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            try:
                return self._transport.connect(self._address)
            except ConnectionLost:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def listen(self, line: Connection, on_message: Callable[[Any], None]) -> None:
        line.listen(lambda message, at_s, contents_s: on_message(message), lambda reason: None)

    def close(self) -> None:
        self._transport.close()

    def task(self, draw: int) -> task_messages.RemoteTask:
        return task_messages.RemoteTask(draw=draw, version=draw, sends_version=True, run_s=0.5)

    def done(self, draw: int) -> task_messages.RemoteTaskDone:
        return task_messages.RemoteTaskDone(draw=draw, busy_s=0.1, measured=STATS)

    def received(self, draw: int) -> task_messages.GradientReceived:
        return task_messages.GradientReceived(1, draw)

    def cancel(self, draw: int) -> task_messages.CancelTask:
        return task_messages.CancelTask(draw)


# --- moving ----------------------------------------------------------------------------------------------------------


def serve(kind: Lines, lines: list[Line], settings: dict[str, Any]) -> dict[str, float]:
    """Send a version to all workers, wait for what each of them answers, and so on; return the seconds of a round."""
    version = torch.ones(settings["nbytes"], dtype=torch.uint8)
    draws, warm_up = settings["draws"] + settings["warm_up"], settings["warm_up"]
    clock, finished, lock = Clock(), threading.Event(), threading.Lock()
    draw = answers = 0

    def on_answer(_: Any) -> None:
        nonlocal answers
        with lock:
            answers += 1
            if answers % len(lines):
                return
        begin()

    def begin() -> None:
        nonlocal draw
        if draw == warm_up:
            clock.start()
        if draw == draws:
            clock.stop()
            finished.set()
            return
        draw += 1
        for line in lines:
            line.send(kind.task(draw), [(0, version)])

    for line in lines:
        if settings["both_ways"]:
            line.post_buckets(cut(torch.zeros(settings["nbytes"], dtype=torch.uint8)))
        kind.listen(line, on_answer)
    time.sleep(0.2)  # all workers have posted their memory
    begin()
    wait(finished)
    return clock.per_round(settings["draws"])


def work(kind: Lines, lines: list[Line], settings: dict[str, Any]) -> dict[str, float]:
    """Answer each version with a gradient of its size, or shortly; return the seconds of a round."""
    [line] = lines
    gradient = torch.ones(settings["nbytes"], dtype=torch.uint8)
    clock, finished = Clock(), threading.Event()

    def on_task(task: Any) -> None:
        if task.draw == settings["warm_up"]:
            clock.start()
        if settings["both_ways"]:
            line.send(kind.done(task.draw), list(enumerate(cut(gradient))))
        else:
            line.send(kind.received(task.draw))
        if task.draw == settings["warm_up"] + settings["draws"]:
            clock.stop()
            finished.set()

    line.post_buckets([torch.zeros(settings["nbytes"], dtype=torch.uint8)])
    kind.listen(line, on_task)
    wait(finished)
    time.sleep(0.5)  # the answer has arrived
    clock.stop(keep_wall=True)
    return clock.per_round(settings["draws"])


def cut(gradient: Tensor) -> list[Tensor]:
    """Return the buckets of a gradient."""
    return [bucket.of(gradient) for bucket in make_buckets(len(gradient), len(gradient))]


class Clock:
    """Wall and processor time of this process between two moments."""

    wall_s = cpu_s = 0.0

    def start(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def stop(self, *, keep_wall: bool = False) -> None:
        wall_s, cpu_s = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        self.wall_s, self.cpu_s = self.wall_s if keep_wall else wall_s, cpu_s

    def per_round(self, rounds: int) -> dict[str, float]:
        return {"wall_s": self.wall_s / rounds, "cpu_s": self.cpu_s / rounds}


# --- interrupts ------------------------------------------------------------------------------------------------------


def interrupt(kind: Lines, lines: list[Line], settings: dict[str, Any]) -> dict[str, list[float]]:
    """Return the round trips of interrupts on an idle link, and while data moves the same way and the other way."""
    [line] = lines
    version = torch.ones(settings["nbytes"], dtype=torch.uint8)
    answered, moved = threading.Event(), threading.Event()

    def on_message(message: Any) -> None:
        (answered if message == kind.cancel(message.draw) else moved).set()

    def round_trip() -> float:
        answered.clear()
        begun_s = time.perf_counter()
        line.send(kind.cancel(1))
        wait(answered)
        return time.perf_counter() - begun_s

    def while_moving(message: Any, buckets: Sequence[tuple[int, Tensor]]) -> list[float]:
        moved.clear()
        line.send(message, buckets)
        time.sleep(INTERRUPT_AFTER_S)
        found = []
        while not moved.is_set():
            took_s = round_trip()
            if not moved.is_set():
                found.append(took_s)
            time.sleep(INTERRUPT_EVERY_S)
        return found

    line.post_buckets(cut(torch.zeros(settings["nbytes"], dtype=torch.uint8)))
    kind.listen(line, on_message)
    time.sleep(0.2)
    trips = {
        "idle": [round_trip() for _ in range(10)],
        "same_way": while_moving(kind.task(1), [(0, version)]),
        "other_way": while_moving(kind.received(1), ()),
    }
    line.send(kind.received(0))
    return trips


def answer_interrupts(kind: Lines, lines: list[Line], settings: dict[str, Any]) -> None:
    [line] = lines
    gradient = torch.ones(settings["nbytes"], dtype=torch.uint8)
    finished = threading.Event()

    def on_message(message: Any) -> None:
        match type(message).__name__:
            case "CancelTask":
                line.send(message)
            case "RemoteTask":
                line.send(kind.received(message.draw))
            case "GradientReceived" if message.draw:
                line.send(kind.done(message.draw), list(enumerate(cut(gradient))))
            case _:
                finished.set()

    line.post_buckets([torch.zeros(settings["nbytes"], dtype=torch.uint8)])
    kind.listen(line, on_message)
    wait(finished)


def wait(event: threading.Event) -> None:
    if not event.wait(LIMIT_S):
        raise TimeoutError(f"nothing came within {LIMIT_S:g} s")


CONTENDERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "move": (serve, work),
    "interrupt": (interrupt, answer_interrupts),
}

if __name__ == "__main__":
    main()
