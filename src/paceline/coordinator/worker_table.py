"""Status of every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Any

from paceline.core.events import Minibatch


class WorkerStatus(Enum):
    """Activity of a worker, as far as the coordinator can tell."""

    IDLE = auto()
    BUSY = auto()
    EXCLUDED = auto()
    PROBED = auto()  # excluded, and busy with work that will not be used
    LOST = auto()


IDLE, BUSY, EXCLUDED, PROBED, LOST = WorkerStatus  # attribute lookup on an enum class is slow
NEVER = -1  # no version


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """Status of one worker and its latest work.

    Attributes:
        status: idle, busy, excluded, probed or lost.
        draw: number of the latest work, from 1.
        version: version that this work begins with.
        started_s: time at which the work was assigned, in seconds.
        minibatch: minibatch of this work; None if the worker draws samples itself.
        contributed_to: current version when its latest gradient was accepted.
        rejections: number of gradients in a row that were not finite.
        skips: number of such gradients whose loop skipped the step itself.
        accepted: newest accepted draw; 0 for none.
        minibatches: number of minibatches of the newest gradient.
    """

    status: WorkerStatus = LOST
    draw: int = 0
    version: int = 0
    started_s: float = 0.0
    minibatch: Minibatch | None = None
    contributed_to: int = NEVER
    rejections: int = 0
    skips: int = 0
    accepted: int = 0
    minibatches: int = 1

    @property
    def share(self) -> float:
        """Samples of its work over those of a whole minibatch."""
        return self.minibatch.share if self.minibatch is not None else 1.0


class WorkerTable:
    """Table of all workers that have ever joined.

    Attributes:
        workers: state of every worker, by number.
        idle: idle workers, in the order in which they became idle.
        in_flight: busy workers, in the order in which their work was assigned.
        live: number of idle and busy workers.
    """

    def __init__(self) -> None:
        self.workers: dict[int, WorkerState] = {}
        self.idle: dict[int, None] = {}
        self.in_flight: dict[int, WorkerState] = {}
        self.live = 0

    def active(self) -> list[int]:
        """Return the idle and busy workers."""
        return [*self.in_flight, *self.idle]

    def excluded(self) -> list[int]:
        """Return the workers that are excluded, probed ones included."""
        return [worker for worker, state in self.workers.items() if state.status in {EXCLUDED, PROBED}]

    def status(self, worker: int) -> WorkerStatus:
        """Return the status of a worker; one that never joined counts as lost."""
        return self.workers[worker].status if worker in self.workers else LOST

    def admit(self, worker: int) -> None:
        """Add a worker as idle."""
        state = self.workers.setdefault(worker, WorkerState())
        state.status = IDLE
        state.rejections = state.skips = 0
        self.idle[worker] = None
        self.live += 1

    def remove(self, worker: int, status: WorkerStatus) -> None:
        """Remove an idle worker, which gets this status."""
        del self.idle[worker]
        self.workers[worker].status = status
        self.live -= 1

    def probe(self, state: WorkerState, version: int, now: float) -> None:
        """Note that an excluded worker computes a gradient that will not be used."""
        state.status = PROBED
        state.draw += 1
        state.version = version
        state.started_s = now
        state.minibatch = None

    def assign(self, worker: int, state: WorkerState, version: int, now: float) -> None:
        """Note that an idle worker begins its next work."""
        del self.idle[worker]
        state.draw += 1
        state.version = version
        state.started_s = now
        state.status = BUSY
        self.in_flight[worker] = state

    def release(self, worker: int, state: WorkerState) -> None:
        """Make a busy worker idle: it has delivered, or its work is cancelled."""
        del self.in_flight[worker]
        state.status = IDLE
        self.idle[worker] = None

    def state_dict(self) -> dict[str, Any]:
        """Return the whole table as plain data."""
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
        """Load such a state; the dictionaries stay the same objects."""
        self.workers.clear()
        for worker, saved in state["workers"].items():
            self.workers[worker] = WorkerState(**{**saved, "status": WorkerStatus[saved["status"]]})
        self.idle.clear()
        self.idle.update(dict.fromkeys(state["idle"]))
        self.in_flight.clear()
        self.in_flight.update({worker: self.workers[worker] for worker in state["in_flight"]})
        self.live = state["live"]
