"""Price of staleness: the largest stable step of a schedule of updates, and what it costs against fresh gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import UsageError
from paceline.policies.estimators.replay.protocol_replay import ProtocolReplay
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import Stateful

Schedule = Sequence[Sequence[int]]
"""Stalenesses of the gradients of each update, in versions."""

MARGIN = 1.15  # with 1.05, short runs were unstable
GRID = 2.0 ** (np.arange(-14 * 16, 1) / 16)  # of the largest stable step with fresh gradients
LEAST_UPDATES = 200
LEAST_TURNS = 24  # updates of a run, per version of the mean staleness
LEAST_MEMORIES = 16  # updates of a run, per update of the memory 1 / (1 - momentum)
LEAST_POWER = 1 / 16  # of the momentum: with a smaller one the limit is almost the same, and the run longer


class Reference(NamedTuple):
    """Updates of fresh gradients that a schedule is compared with, and the momentum of both.

    Attributes:
        momentum: mu in [0, 1).
        K: gradients after which the velocity has fallen to the share mu; None if it falls so far with every update.
        limit: largest stable step with fresh gradients.
    """

    momentum: float = 0.0
    K: int | None = None
    limit: float = 2.0

    @classmethod
    def of_sgd(cls, momentum: float, K: int) -> Reference:
        """Return the reference of SGD, whose steps are stable up to a = 2 (1 + mu) / (1 - mu).

        >>> round(Reference.of_sgd(momentum=0.9, K=8).limit)
        38
        """
        return cls(momentum, K, 2 * (1 + momentum) / (1 - momentum))

    def momentum_of(self, k: int) -> float:
        """Return the momentum of an update of k gradients."""
        return self.momentum if self.K is None else float(self.momentum ** max(k / self.K, LEAST_POWER))

    def price_at(self, a: float) -> float:
        """Return the price of staleness of a schedule whose largest stable step is a."""
        return 1.0 if a >= self.limit else MARGIN * self.limit / a


PLAIN = Reference()


class StabilityScan:
    """Scan for the largest step a at which gradient descent on x^2 / 2 is stable under a schedule of updates.

    The update of version i, of gradients with stalenesses t_1 ... t_k and momentum mu, is

        m_{i+1} = mu m_i + mean_j x_{i - t_j},    x_{i+1} = x_i - a (1 - mu) m_{i+1},

    repeated until the largest deviation of the last quarter can be compared with that of the quarter before, for many
    steps side by side. The step a is that of a whole movement: one gradient moves x by a times itself in the end.

    Momentum makes fresh gradients stable at larger steps, up to 2 (1 + mu) / (1 - mu), but stale ones hardly: with the
    same staleness t of all gradients the limit is between 1 / t and pi / (2 t), nearly, whatever mu is.

    Args:
        schedule: stalenesses of the gradients of each update, one or more updates of one or more gradients.
        reference: momentum, and the largest step that is tried.

    Attributes:
        updates: number of updates so far.

    Raises:
        UsageError: the schedule, or one of its updates, is empty.
    """

    def __init__(self, schedule: Schedule, reference: Reference = PLAIN) -> None:
        if not schedule or not all(schedule):
            raise UsageError(f"schedule={schedule!r} has no update, or an update without gradients")
        self.updates = 0
        self._schedule = schedule
        self._limit = reference.limit
        stalenesses = [staleness for update in schedule for staleness in update]
        self._first = max(stalenesses)  # row of version 0, after those that stale gradients read at the start
        self._momenta = {k: reference.momentum_of(k) for k in set(map(len, schedule))}  # of an update of k gradients
        memory = 1 / (1 - max(self._momenta.values()))
        mean_staleness = sum(stalenesses) / len(stalenesses)
        least = max(LEAST_UPDATES, LEAST_TURNS * mean_staleness, LEAST_MEMORIES * memory)
        self._count = len(schedule) * ceil(least / len(schedule)) if any(stalenesses) else 0
        self._versions = np.empty((self._first + self._count + 1, len(GRID)))  # x of each version, for each step
        self._versions[: self._first + 1] = 1.0
        self._rows = list(self._versions)
        self._velocity = np.zeros(len(GRID))
        self._steps = {k: self._limit * GRID * (1 - momentum) for k, momentum in self._momenta.items()}

    @property
    def is_done(self) -> bool:
        """Whether the step is known."""
        return self.updates >= self._count

    @property
    def step(self) -> float:
        """Largest stable step; that of the reference for fresh gradients. All updates must be run.

        The steps are searched from below: at a = 1 a single fresh gradient makes x = 0, which looks stable however
        stale the others are.
        """
        if not self._count:
            return self._limit
        made = np.abs(self._versions[self._first + 1 :])
        half, quarter = self._count // 2, 3 * self._count // 4
        stable = made[quarter:].max(axis=0) <= made[half:quarter].max(axis=0)  # false for nan
        below = len(GRID) if stable.all() else int(np.argmin(stable))
        return float(self._limit * GRID[max(below - 1, 0)])

    def advance(self, updates: int) -> None:
        """Run at most this many updates."""
        rows, velocity, move = self._rows, self._velocity, np.empty(len(GRID))
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(self.updates, min(self.updates + updates, self._count)):
                stalenesses, now = self._schedule[i % len(self._schedule)], self._first + i
                k = len(stalenesses)
                total = rows[now - stalenesses[0]]
                for staleness in stalenesses[1:]:
                    total = np.add(total, rows[now - staleness], move)
                velocity *= self._momenta[k]
                velocity += np.divide(total, k, move)
                np.subtract(rows[now], np.multiply(self._steps[k], velocity, move), rows[now + 1])
        self.updates = min(self.updates + updates, self._count)


def largest_stable_step(schedule: Schedule, reference: Reference = PLAIN) -> float:
    """Return the largest step a at which gradient descent is stable under a schedule of updates, by ``StabilityScan``.

    Args:
        schedule: stalenesses of the gradients of each update, one or more updates of one or more gradients.
        reference: momentum, and the largest step that is tried.

    Returns:
        Step; without momentum 2 for fresh gradients, and about 2 sin(pi / (4 t + 2)) for a constant staleness t.

    Raises:
        UsageError: the schedule, or one of its updates, is empty.

    Example:
        >>> round(largest_stable_step([[0, 0]]), 2), round(largest_stable_step([[7]]), 2)
        (2.0, 0.2)

    Source: the stability limit of delayed gradient descent; for a constant delay Levin and May, "A note on
    difference-delay equations", 1976.
    """
    scan = StabilityScan(schedule, reference)
    while not scan.is_done:
        scan.advance(LEAST_UPDATES)
    return scan.step


def price_of(schedule: Schedule, reference: Reference = PLAIN) -> float:
    """Return the price of staleness d = 1.15 A / a; 1 for fresh gradients.

    Here a is the largest stable step of the schedule, and A that of the reference.

    >>> price_of([[0, 0]]), round(price_of([[7]]), 1)
    (1.0, 11.4)
    >>> round(price_of([[7]], Reference.of_sgd(momentum=0.9, K=8)))
    307
    """
    return reference.price_at(largest_stable_step(schedule, reference))


def even_schedule(protocol: Protocol, n: int) -> list[tuple[int, ...]]:
    """Return the schedule of updates of a protocol on n workers of almost equal speed, or more if it needs them."""
    if protocol.refill == "update" and isinstance(protocol.quorum, int):
        n = max(n, protocol.quorum)
    gradients = 8 * max(n, protocol.quorum if isinstance(protocol.quorum, int) else n)
    replay = ProtocolReplay(protocol, [[1.0 + 0.1 * worker / n] for worker in range(n)]).run(gradients)
    return replay.schedule[len(replay.schedule) // 2 :]


class StalenessPrice(Stateful):
    """Price of staleness of a run, from its own recent updates.

    It is the mean over windows of 256 gradients, the latest of which has at least an eighth of the weight. Until a
    protocol has made its first window, of 32 gradients or two of each worker, the price is that of workers of almost
    equal speed, or one that was given. The scan of a window takes the next updates, a small piece at each.

    Args:
        reference: updates of fresh gradients, and the momentum.

    Attributes:
        price: d, >= 1; 1 for a protocol that accepts fresh gradients only.
    """

    _saved = ("price", "_window", "_left", "_windows", "_is_fresh", "_scanned", "_progress")

    def __init__(self, reference: Reference = PLAIN) -> None:
        self._reference = reference
        self.price = 1.0
        self._window: list[tuple[int, ...]] = []
        self._left = 0  # gradients until the window is complete
        self._windows = 0
        self._is_fresh = True
        self._scanned: list[tuple[int, ...]] = []  # window whose price is computed; empty for none
        self._progress = 0  # updates of its scan
        self._scan: StabilityScan | None = None

    def follow(self, protocol: Protocol, n: int, price: float | None = None) -> None:
        """Begin with a protocol on n workers, at a price that is known or at that of workers of equal speed."""
        self._is_fresh = protocol.max_staleness == 0
        if price is None:
            price = 1.0 if self._is_fresh else price_of(even_schedule(protocol, n), self._reference)
        self.price = price
        self._window.clear()
        self._left = max(FIRST_WINDOW, TURNS * n)
        self._windows = 0
        self._begin_scan([])

    def observe(self, stalenesses: tuple[int, ...]) -> None:
        """Add an update."""
        if self._is_fresh:
            return
        if self._scan is not None:
            self._advance(self._scan)
        self._window.append(stalenesses)
        self._left -= len(stalenesses)
        if self._left <= 0 and self._scan is None:
            self._begin_scan(self._window)
            self._window = []
            self._left = WINDOW

    def _begin_scan(self, window: list[tuple[int, ...]]) -> None:
        self._scanned = window
        self._progress = 0
        self._scan = StabilityScan(window, self._reference) if window else None

    def _advance(self, scan: StabilityScan) -> None:
        scan.advance(PIECE)
        self._progress = scan.updates
        if scan.is_done:
            self._windows += 1
            self.price += (self._reference.price_at(scan.step) - self.price) / min(self._windows, MOST_WINDOWS)
            self._begin_scan([])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state; the scan in progress is repeated up to where it was."""
        super().load_state_dict(state)
        progress = self._progress
        self._begin_scan(self._scanned)
        if self._scan is not None:
            self._scan.advance(progress)
            self._progress = progress


FIRST_WINDOW, WINDOW = 32, 256  # gradients
TURNS = 2  # of the workers, at least, in the first window
MOST_WINDOWS = 8
PIECE = 32  # updates of a scan at each update
