"""Ledger of the gradients that count without a server: which sum each is in, and which rank has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.events import Accept, Apply, Compute
from paceline.core.gradient import StepPlace
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.transport.announced_messages import LOST, SummedGradient


@dataclass(kw_only=True)
class CountedGradient:
    """Gradient that counts.

    Attributes:
        task: task whose gradient it is.
        number: number of its sum.
        weight: what it counts in the mean of an update, > 0.
        missing: indices of the parameters that it lacks, as the content of `IndexBits`.
        at: number of the worker whose rank has it; None if it is lost.
        step_place: place of its step in a loop with several optimizers; None in another one.
    """

    task: Compute
    number: int
    weight: float
    missing: bytes
    at: int | None
    step_place: StepPlace | None

    @property
    def summed(self) -> SummedGradient:
        """Its form in a message."""
        at = LOST if self.at is None else self.at
        return SummedGradient(worker=self.task.worker, draw=self.task.draw, weight=self.weight, at=at)


class LedgerSum(NamedTuple):
    """Sum that was announced.

    Attributes:
        number: number of the sum, counted from 1.
        gradients: gradients in it.
        version: version that its update makes, or that is in progress if it makes none.
        makes: whether it makes the update.
    """

    number: int
    gradients: tuple[CountedGradient, ...]
    version: int
    makes: bool

    @property
    def missing(self) -> IndexBits:
        """Indices of the parameters that all gradients of the sum lack."""
        return IndexBits.in_all([each.missing for each in self.gradients])


class GradientLedger:
    """Ledger of the gradients that count, from their acceptance until all ranks have their sum.

    A rank that is lost takes its gradients with it. They count all the same: another rank computes them again, before
    the sum that they are in, at the version at which they were computed. Stale ones are computed at the newest version.

    Attributes:
        number: number of the newest sum; 0 before the first one.
        version: newest version that the sums make.
        made: newest version that all ranks are known to have.
    """

    def __init__(self) -> None:
        self.number = 0
        self.version = 0
        self.made = 0
        self._tasks: dict[int, Compute] = {}  # newest one of each worker
        self._lost_through: dict[int, int] = {}  # newest task of the lost process of a worker
        self._next: list[CountedGradient] = []  # of the next sum
        self._sums: list[LedgerSum] = []  # that a rank may lack

    def resume_at(self, version: int) -> None:
        """Begin with this version."""
        self.version = self.made = version

    @property
    def has_next(self) -> bool:
        """Whether gradients count that are in no sum yet."""
        return bool(self._next)

    @property
    def has_lost(self) -> bool:
        """Whether a gradient that counts is at no rank."""
        return any(each.at is None for each in self._counted())

    def assign(self, task: Compute) -> None:
        """Note a task, of which the gradient may count."""
        self._tasks[task.worker] = task

    def accept(self, command: Accept, missing: bytes) -> None:
        """Count the gradient of a worker's newest task, which is lost already if the worker is.

        Its rank has had its version, for whose sum all ranks had to be there. So all have the sums before.
        """
        worker = command.worker
        task = self._tasks[worker]
        self.made = max(self.made, task.version - 1)
        self._next.append(
            CountedGradient(
                task=task,
                number=self.number + 1,
                weight=command.weight,
                missing=missing,
                at=None if task.draw <= self._lost_through.get(worker, 0) else worker,
                step_place=command.step_place,
            )
        )

    def announce(self, update: Apply | None) -> LedgerSum:
        """Return the sum of all gradients that count and are in no sum yet; none of them is lost.

        Args:
            update: update that the sum makes; None if it is still to come.
        """
        self.number += 1
        announced = LedgerSum(self.number, tuple(self._next), self.version + 1, makes=update is not None)
        self._next = []
        if update is not None:
            self.version = update.version
            self._sums = [each for each in self._sums if each.version > self.made]
        self._sums.append(announced)
        return announced

    def drop(self) -> None:
        """Drop the gradients that are in no sum yet: they do not count any more."""
        self._next = []

    def settle(self, number: int) -> None:
        """Note that all ranks have the sums up to a number."""
        for each in self._sums:
            if each.number <= number and each.makes:
                self.made = each.version
        self._sums = [each for each in self._sums if each.number > number]

    def lose(self, worker: int) -> None:
        """Note that a rank is lost, with all that it has."""
        if worker in self._tasks:
            self._lost_through[worker] = self._tasks[worker].draw
        for each in self._counted():
            if each.at == worker:
                each.at = None

    def lost(self, *, in_sums: bool) -> list[CountedGradient]:
        """Return the lost gradients that the ranks can compute again now: not those of a version that ranks still lack.

        Args:
            in_sums: whether those are left out that are in no sum yet.
        """
        gradients = self._in_sums() if in_sums else self._counted()
        return [each for each in gradients if each.at is None and each.task.version <= self.made]

    def open_gradients(self) -> list[SummedGradient]:
        """Return the gradients of the sums that ranks lack."""
        return [each.summed for each in self._in_sums()]

    def _in_sums(self) -> Iterator[CountedGradient]:
        for announced in self._sums:
            yield from announced.gradients

    def _counted(self) -> Iterator[CountedGradient]:
        yield from self._in_sums()
        yield from self._next
