"""The same arrivals in three engines: events of the local and of the distributed engine, replayed in the virtual one.

Every protocol of the catalogue's test table runs on real processes. Its events then go through another coordinator and
the virtual engine, which computes every gradient itself. All decisions must be equal, and the parameters must be equal
up to rounding. With bf16 on the wire they are compared with those of a virtual engine that rounds in the same way, and
of one that does not round.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from common import options, report, rounded
from equality import difference
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply, Arrival, Command, Compute, Event, Measured, SetTimer, Step, UpdateApplied
from paceline.engines.loop import RunLoop
from paceline.engines.virtual.parameter_server import SimulatedServer
from paceline.engines.virtual.timing import TimedWorkers
from paceline.run.config import RunConfig
from paceline.run.session import Session
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.worker.replica import Replica

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support/coordinator"))
from catalogue_table import TABLE  # type: ignore[import-not-found]

WORKERS = 4
SEED = 5
EXACT, ALIKE = 1e-12, 1e-5  # bars in float64, and in float32 where both sides round to bf16
COMPENSATED = ["asp + dc_asgd(lambda0=0.04)", "k_async(k=2) + staleness_weight"]
PROTOCOLS = [*(str(row[1]) for row in TABLE), *COMPENSATED]
SAMPLES, FEATURES, HIDDEN, CLASSES, BATCH = 2000, 20, 50, 10, 32
RANK = "--rank"


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == [RANK]:
        follow(json.loads(sys.argv[2]))
        return
    parser = options(__doc__ or "", rounds=1)
    parser.add_argument("--updates", type=int, default=40, help="updates of each run")
    parser.add_argument("--protocols", nargs="+", default=PROTOCOLS)
    args = parser.parse_args()
    results = {}
    for _ in range(args.rounds):
        local = [compare(setting(each, pl.LocalCluster(WORKERS, threads=1), args)) for each in args.protocols]
        results["local"] = summary(local, args, {"exact": EXACT})
        results["distributed"] = summary(distributed(args, "float32"), args, {"exact": EXACT})
        results["distributed, wire=bf16"] = summary(distributed(args, "bf16"), args, {"alike": ALIKE})
    report("same_arrivals", args, results)


def summary(rows: Sequence[dict[str, Any]], args: argparse.Namespace, bars: dict[str, float]) -> dict[str, Any]:
    """Return the worst result of all protocols, and whether it meets the bar."""
    worst = {kind: max(row[kind] for row in rows) for kind in rows[0] if kind not in ("decisions", "same")}
    return {
        "bar": {"decisions": "all the same", "largest_relative_difference": bars},
        "largest_relative_difference": {kind: rounded(value) for kind, value in worst.items()},
        "decisions": sum(row["decisions"] for row in rows),
        "meets_bar": all(row["same"] for row in rows) and all(worst[kind] <= bar for kind, bar in bars.items()),
        "protocols": dict(zip(args.protocols, rows, strict=True)),
    }


# --- a run and its replay --------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """Events and commands of an engine, and the trained model."""

    events: list[Event]
    commands: list[Command]
    model: nn.Module


class Again(TimedWorkers):
    """Workers, and the clock, of a run of which the events are known."""

    def __init__(self, events: Sequence[Event]) -> None:
        super().__init__(pl.Cluster(WORKERS), SEED)
        self._seen = list(reversed(events))

    def next_event(self, on_idle: Callable[[], None]) -> Event:
        """Return the next event of the other run."""
        event = self._seen.pop()
        self.now = event.now
        return event

    def step(self) -> Step | None:
        """Return the step that the other run has measured, if its event is the next one."""
        event = self._seen[-1] if self._seen else None
        return event.step if isinstance(event, UpdateApplied) else None

    def tick(self) -> None:
        """Leave out the event of a measured step, which the loop makes at the same time."""
        if self._seen and isinstance(self._seen[-1], UpdateApplied):
            self.now = self._seen.pop().now

    def set_timer(self, command: SetTimer) -> None:
        """Do nothing: expired timers are among the events."""


class AsMeasured(SimulatedServer):
    """Parameters with gradients that are computed again, and arrivals and steps as the other run has measured them."""

    def __init__(self, timed: Again, replica: Replica, server: ParameterServer) -> None:
        super().__init__(timed, replica, server, "float32")
        self._again = timed

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Compute the gradient, and return the arrival as it was."""
        super().arrived(arrival, coordinator)
        return arrival

    def apply(self, command: Apply) -> Step | None:
        """Make the update, and return the step as it was measured."""
        super().apply(command)
        return self._again.step()


class Rounded(AsMeasured):
    """The same, with numbers that are rounded to bf16 on their way."""

    def _compute_gradient(self, work: Compute, minibatches: int) -> Measured:
        self._server.flush()
        rounded = self._replica.layout.allocate()
        rounded.copy_(self._versions[work.version])
        round_(rounded)
        measured = self._replica.gradient(work.worker, work.draw, work.minibatch, rounded, self._gradient)
        round_(self._gradient)
        return measured


def round_(vectors: FlatBuffers) -> None:
    """Round float32 parameters as on a wire with bf16."""
    for flat in vectors.flat_parameters:
        flat.copy_(flat.bfloat16())


def compare(real: RunConfig) -> dict[str, Any]:
    """Run a setting, and replay its events in the virtual engine."""
    seen = watch(real)
    bf16 = isinstance(real.cluster, pl.Torchrun) and real.cluster.wire == "bf16"
    row: dict[str, Any] = {"decisions": len(seen.commands), "same": True}
    for kind, rounds in {"alike": True, "unrounded": False}.items() if bf16 else [("exact", False)]:
        again = replay(real, seen.events, rounds=rounds)
        row["same"] &= again.commands == seen.commands
        row[kind] = rounded(difference(seen.model, again.model))
    return row


def watch(given: RunConfig) -> Seen:
    session = Session(given)
    seen = Seen([], [], session.model)
    with session.engine() as engine:
        engine.run(session.coordinator, partial(note, seen))
    return seen


def replay(real: RunConfig, events: Sequence[Event], *, rounds: bool) -> Seen:
    again = RunConfig(
        job=real.job, plan=parse_plan(str(real.plan)), cluster=pl.Cluster(WORKERS), stop=real.stop, seed=real.seed
    )
    session = Session(again)
    seen = Seen([], [], session.model)
    coordinator = real.rules.coordinator(real.checked_plan, real.stop)  # with the timeouts of real workers
    replica, timed = Replica(again.job, again.seed, WORKERS), Again(events)
    parameters = (Rounded if rounds else AsMeasured)(timed, replica, session.server)
    RunLoop(timed, parameters, timed).run(coordinator, partial(note, seen))
    return seen


def note(seen: Seen, now: float, event: Event | None, commands: Sequence[Command]) -> None:
    if event is not None:
        seen.events.append(event)
    seen.commands.extend(commands)


# --- the setting -----------------------------------------------------------------------------------------------------


def setting(protocol: str, cluster: pl.LocalCluster | pl.Torchrun, args: argparse.Namespace) -> RunConfig:
    dtype = torch.float32 if isinstance(cluster, pl.Torchrun) and cluster.wire == "bf16" else torch.float64
    return RunConfig(
        job=make_job(dtype), plan=parse_plan(protocol), cluster=cluster, stop=pl.Stop(updates=args.updates), seed=SEED
    )


def make_job(dtype: torch.dtype) -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return pl.Job(
        model=partial(make_model, dtype),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
        data=TensorDataset(inputs.to(dtype), labels),
        batch_size=BATCH,
        microbatches=2,  # so that the controllers that read the variance have one
    )


def make_model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).to(dtype)


# --- ranks -----------------------------------------------------------------------------------------------------------


def distributed(args: argparse.Namespace, wire: str) -> list[dict[str, Any]]:
    """Compare runs with this process as rank 0 and started processes as workers."""
    ports = free_ports(len(args.protocols))  # one port per run, so that no rank connects to the server of another run
    settings = {"wire": wire, "ports": ports, "updates": args.updates, "protocols": args.protocols}
    with ranks(settings):
        return [
            compare(setting(protocol, torchrun(wire, port), args))
            for protocol, port in zip(args.protocols, ports, strict=True)
        ]


def follow(settings: dict[str, Any]) -> None:
    """Run a worker in one run after another."""
    args = argparse.Namespace(updates=settings["updates"])
    for protocol, port in zip(settings["protocols"], settings["ports"], strict=True):
        ours = setting(protocol, torchrun(settings["wire"], port), args)
        pl.train(ours.job, protocol=ours.plan, cluster=ours.cluster, stop=ours.stop, seed=SEED)


def torchrun(wire: str, port: int) -> pl.Torchrun:
    return pl.Torchrun(address=f"127.0.0.1:{port}", wire=wire, threads=1)


@contextmanager
def ranks(settings: dict[str, Any]) -> Iterator[None]:
    """Make this process rank 0, and start the others."""
    command = [sys.executable, __file__, RANK, json.dumps(settings)]
    with ExitStack() as stack:
        processes = [subprocess.Popen(command, env={**os.environ, **variables(rank)}) for rank in range(1, WORKERS + 1)]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.terminate)
        with patch.dict(os.environ, variables(0)):
            yield


def variables(rank: int) -> dict[str, str]:
    size = str(WORKERS + 1)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PACELINE_TOKEN": "a benchmark"}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


if __name__ == "__main__":
    main()
