"""Who is there, who is idle, and who is at work on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Any

from paceline.core.events import Minibatch


class WorkerStatus(Enum):
    """What a worker is doing, as far as the coordinator knows."""

    IDLE = auto()
    BUSY = auto()
    ASIDE = auto()
    PROBED = auto()  # set aside, and at work that will not be used
    LOST = auto()


IDLE, BUSY, ASIDE, PROBED, LOST = WorkerStatus  # looked up several times an event, and an enum is slow at that
NEVER = -1  # a version that there is none of


@dataclass(slots=True)
class WorkerState:
    """One worker.

    Attributes:
        draw: the latest work given to it, counted from 1.
        version: that this work begins with.
        started_s: when it was given.
        contributed_to: version that was open when its latest gradient was accepted.
        rejections: gradients in a row that were not finite.
    """

    status: WorkerStatus = LOST
    draw: int = 0
    version: int = 0
    started_s: float = 0.0
    minibatch: Minibatch | None = None
    contributed_to: int = NEVER
    rejections: int = 0


class WorkerTable:
    """All workers that were ever there.

    Attributes:
        workers: by number.
        idle: those without work, in the order in which they became idle.
        in_flight: those at work, in the order in which they were given it.
        live: how many take part: idle or at work.
    """

    def __init__(self) -> None:
        self.workers: dict[int, WorkerState] = {}
        self.idle: dict[int, None] = {}
        self.in_flight: dict[int, WorkerState] = {}
        self.live = 0

    def taking_part(self) -> list[int]:
        """Return the workers that are at work or idle."""
        return [*self.in_flight, *self.idle]

    def aside(self) -> list[int]:
        """Return the workers that were set aside and are still there."""
        return [worker for worker, state in self.workers.items() if state.status in {ASIDE, PROBED}]

    def status(self, worker: int) -> WorkerStatus:
        """Return what a worker is doing; one that was never there is lost."""
        return self.workers[worker].status if worker in self.workers else LOST

    def enlist(self, worker: int) -> None:
        """Let a worker take part, idle."""
        state = self.workers.setdefault(worker, WorkerState())
        state.status = IDLE
        state.rejections = 0
        self.idle[worker] = None
        self.live += 1

    def strike(self, worker: int, status: WorkerStatus) -> None:
        """Let an idle worker no longer take part."""
        del self.idle[worker]
        self.workers[worker].status = status
        self.live -= 1

    def probe(self, state: WorkerState, version: int, now: float) -> None:
        """Give a worker that was set aside work that nobody waits for."""
        state.status = PROBED
        state.draw += 1
        state.version = version
        state.started_s = now
        state.minibatch = None

    def occupy(self, worker: int, state: WorkerState, version: int, now: float) -> None:
        """Give an idle worker its next work."""
        del self.idle[worker]
        state.draw += 1
        state.version = version
        state.started_s = now
        state.status = BUSY
        self.in_flight[worker] = state

    def release(self, worker: int, state: WorkerState) -> None:
        """Take a worker out of flight: it has delivered, or its work is abandoned."""
        del self.in_flight[worker]
        state.status = IDLE
        self.idle[worker] = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as plain data."""
        return {
            "workers": {
                worker: {**asdict(state), "status": state.status.name, "minibatch": state.minibatch}
                for worker, state in self.workers.items()
            },
            "idle": list(self.idle),
            "in_flight": list(self.in_flight),
            "live": self.live,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; the dictionaries stay the same objects."""
        self.workers.clear()
        for worker, saved in state["workers"].items():
            self.workers[worker] = WorkerState(**{**saved, "status": WorkerStatus[saved["status"]]})
        self.idle.clear()
        self.idle.update(dict.fromkeys(state["idle"]))
        self.in_flight.clear()
        self.in_flight.update({worker: self.workers[worker] for worker in state["in_flight"]})
        self.live = state["live"]
