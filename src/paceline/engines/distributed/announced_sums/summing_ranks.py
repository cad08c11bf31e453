"""Ranks that sum what the coordinator announces: their sums, their steps, their state, and the loss of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, NamedTuple

from paceline.core.events import AbortRun, Apply, Outcome, Step
from paceline.engines.distributed.announced_sums.gradient_ledger import CountedGradient, GradientLedger
from paceline.engines.distributed.announced_sums.sum_groups import SumGroups
from paceline.engines.distributed.parameter_server.remote_worker import RemoteWorker
from paceline.engines.distributed.transport.announced_messages import (
    AnnounceSum,
    GradientRecomputed,
    RecomputeGradient,
    ResumeSums,
    SaveShards,
    SendState,
    ShardSaved,
    StateFollows,
    StepMade,
    SumsMade,
)
from paceline.engines.distributed.transport.connection import ConnectionLost
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import GroupBroken
from paceline.engines.real_clock import RealClock
from paceline.errors import RunError
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
ALL_GONE = (
    "all ranks are gone, and with them the newest parameters: paceline run continues from the last checkpoint in out="
)
TASKS = 2  # of a rank that computes a gradient again: first it ends its own
MOST_UNREACHABLE = 3  # groups in a row that could not connect though all members are there


class Request(NamedTuple):
    """Gradient of a lost worker that another one computes.

    Attributes:
        gradient: the gradient.
        by: the other worker.
        since_s: time of the request, seconds since the run began.
    """

    gradient: CountedGradient
    by: RemoteWorker
    since_s: float


class SummingRanks:
    """Ranks of a run without a server, as its coordinator sees them.

    Args:
        groups: groups of the ranks.
        clock: clock of the run.
        read: reads messages of the ranks for a moment.
        timeout_s: returns the seconds after which a rank that computes counts as lost.

    Attributes:
        ledger: gradients that count.
        is_busy: whether the coordinator waits for the ranks, so that none may join or leave.
        newest_step: newest step that a rank has told.
    """

    def __init__(
        self, groups: SumGroups, clock: RealClock, read: Callable[[], None], timeout_s: Callable[[], float]
    ) -> None:
        self.ledger = GradientLedger()
        self.is_busy = False
        self._groups = groups
        self._clock = clock
        self._read = read
        self._timeout_s = timeout_s
        self.newest_step: Step | None = None
        self._step_version = 0  # version of that step
        self._asked: RemoteWorker | None = None  # for its state
        self._state: dict[str, Any] | None = None  # of that rank
        self._saved: ShardSaved | None = None  # its answer
        self._is_agreed = True  # whether the members of the newest group have the same sums
        self._requested: dict[tuple[int, int], Request] = {}  # by worker and draw
        self._unreachable = 0

    # --- in the run ---------------------------------------------------------------------------------------

    def announce(self, update: Apply | None, options: bytes = b"") -> None:
        """Let the ranks sum the gradients that count, and make an update if it is given, with options of its step."""
        while self.ledger.has_lost:
            self._recover(in_sums=False)
            if self.ledger.has_lost:  # of a version that no rank has yet
                self.state()
        announced = self.ledger.announce(update)
        gradients = [each.summed for each in announced.gradients]
        early = 0 if self._groups.is_broken else self._groups.rounds.generation_of(gradients)
        self._groups.send(
            AnnounceSum.of(announced.number, gradients, announced.missing, update, options=options, early=early)
        )

    def await_step(self, version: int) -> Step:
        """Wait for the step that has made a version: no other event comes between the update and its step."""
        with self._busy():
            while self.newest_step is None or self._step_version < version:
                self._recover_if_broken()
                self._read()
        return self.newest_step

    def state(self) -> dict[str, Any]:
        """Return the state of a rank's server after all sums.

        Raises:
            RunError: no rank is left.
        """
        while self._groups.members:
            state = self.state_of(self._groups.members[min(self._groups.members)])
            if state is not None:
                return state
        raise RunError(ALL_GONE)

    def state_of(self, source: RemoteWorker) -> dict[str, Any] | None:
        """Return the state of the server of a rank after all sums; None if the rank is lost meanwhile."""
        self._state = None
        self._asked = source
        source.connection.send(SendState())
        with self._busy():
            while self._is_member(source) and self._state is None:
                self._recover_if_broken()
                self._read()
        return self._state

    def save_shards(self) -> None:
        """Let the ranks of one worker save their shards of the newest version, after all sums.

        Raises:
            RunError: no worker is left, or a shard cannot be saved.
        """
        while self._groups.members:
            source = self._groups.members[min(self._groups.members)]
            self._saved = None
            self._asked = source
            source.connection.send(SaveShards(self.ledger.version))
            with self._busy():
                while self._is_member(source) and self._saved is None:
                    self._recover_if_broken()
                    self._read()
            if self._saved is not None:
                if self._saved.reason:
                    raise RunError(f"worker {source.worker} cannot save its shards: {self._saved.reason}")
                return
        raise RunError(ALL_GONE)

    # --- losses -------------------------------------------------------------------------------------------

    def lose(self, worker: RemoteWorker) -> None:
        """Note that a rank is gone, with what it has."""
        if self._groups.remove(worker):
            self.ledger.lose(worker.worker)
        self._requested = {key: each for key, each in self._requested.items() if each.by is not worker}

    def settle(self) -> None:
        """Let the ranks go on after the loss of one."""
        if not self.is_busy:
            self._recover_if_broken()

    def on_message(self, worker: RemoteWorker, message: Message) -> None:
        """Handle a message of a rank, if it is one about sums.

        Raises:
            ValueError: it cannot be an answer of an honest rank.
        """
        match message:
            case StepMade() | SumsMade() | GroupBroken() if not self._is_member(worker):
                raise ValueError(f"it sent {type(message).__name__}, but it is in no group")
            case StepMade():
                self._on_step(message)
            case StateFollows() if worker is not self._asked:
                raise ValueError("it sends a state that it was not asked for")
            case StateFollows() if self._groups.are_sharded:
                self._state = {}
            case StateFollows():
                with suppress(ConnectionLost):  # its loss is an event that follows
                    self._state = self._groups.receive_state(worker)  # at once, because the rank waits for it
            case ShardSaved() if worker is not self._asked:
                raise ValueError("it has saved a shard, which it was not asked for")
            case ShardSaved():
                self._saved = message
            case SumsMade(generation, number):
                if number > self.ledger.number:
                    raise ValueError(f"it has made {number} sums of {self.ledger.number}")
                if generation == self._groups.generation and not self._groups.is_broken:
                    self.ledger.settle(number)
                    self._is_agreed = True
                    self._unreachable = 0
            case GroupBroken(generation, reason, is_unreachable):
                if generation == self._groups.generation:
                    self._on_broken(worker, reason, is_unreachable=is_unreachable)
            case GradientRecomputed(number, draw, is_here):
                self._on_recomputed(worker, (number, draw), is_here=is_here)

    def _on_step(self, made: StepMade) -> None:
        step = made.measured
        if made.version > self.ledger.version:
            raise ValueError(f"it sent the step of version {made.version}, which it was not asked for")
        if step is not None and made.version >= self._step_version:
            self.newest_step = step
            self._step_version = made.version
        if made.not_finite:
            self._clock.add(AbortRun(self._clock.elapsed_s(), Outcome.NOT_FINITE, made.not_finite))

    def _on_broken(self, worker: RemoteWorker, reason: str, *, is_unreachable: bool) -> None:
        self._groups.is_broken = True
        self._unreachable += is_unreachable
        if self._unreachable >= MOST_UNREACHABLE:
            raise RunError(
                f"worker {worker.worker} does not reach all other ranks, though they are running ({reason}): repair "
                "the link between their hosts, or start them elsewhere; paceline run continues from the last "
                "checkpoint in out="
            )

    def _on_recomputed(self, worker: RemoteWorker, key: tuple[int, int], *, is_here: bool) -> None:
        request = self._requested.get(key)
        if request is None or request.by is not worker:
            raise ValueError(f"it has computed a gradient of worker {key[0]}, which it was not asked for")
        del self._requested[key]
        if is_here:
            request.gradient.at = worker.worker

    def _recover_if_broken(self) -> None:
        if self._groups.is_broken:
            self._recover(in_sums=True)

    def _recover(self, *, in_sums: bool) -> None:
        """Let the members that are left form a group, agree on the sums that are made, and compute what is lost.

        Args:
            in_sums: whether only what is in a sum is computed; the rest may wait for the next sum.
        """
        with self._busy():
            self._groups.is_broken = True
            while not self._has_recovered(in_sums=in_sums):
                self._read()
        self._groups.send(ResumeSums(self._groups.generation, encoded(self.ledger.open_gradients())))

    def _has_recovered(self, *, in_sums: bool) -> bool:
        if not self._groups.members:
            raise RunError(ALL_GONE)
        if self._groups.is_broken:
            self._groups.reform()
            self._is_agreed = False
        if not self._is_agreed:
            return False
        lost = self.ledger.lost(in_sums=in_sums)
        for each in lost:
            self._request(each)
        self._disconnect_silent()
        return not lost

    def _disconnect_silent(self) -> None:
        """Disconnect the ranks that do not compute a lost gradient in time, since all others wait for it."""
        for key, request in self._requested.items():
            waited_s = self._clock.elapsed_s() - request.since_s
            if waited_s > TASKS * self._timeout_s():
                LOG.warning(
                    "worker %d has not computed a gradient of a lost worker again for %.3g s, and is disconnected",
                    request.by.worker,
                    waited_s,
                )
                request.by.connection.close()
                self._requested[key] = request._replace(since_s=inf)  # until its loss is an event

    def _request(self, gradient: CountedGradient) -> None:
        """Let a rank compute a lost gradient, preferably one that computes nothing else."""
        task = gradient.task
        if (task.worker, task.draw) in self._requested:
            return
        staying = [each for each in self._groups.members.values() if not each.is_leaving]
        if not staying:
            raise RunError(ALL_GONE)
        able = [each for each in staying if not each.is_paused]
        if not able:
            return
        asked = [each.by for each in self._requested.values()]
        by = min(able, key=lambda each: (asked.count(each) + each.computes_at(task.version), each.worker))
        LOG.warning("worker %d computes a gradient of worker %d, which is gone, again", by.worker, task.worker)
        self._requested[task.worker, task.draw] = Request(gradient, by, self._clock.elapsed_s())
        minibatch = b"" if task.minibatch is None else encoded(task.minibatch)
        by.connection.send(
            RecomputeGradient(
                number=gradient.number,
                worker=task.worker,
                draw=task.draw,
                weight=gradient.weight,
                run_s=self._clock.elapsed_s(),
                minibatch=minibatch,
                step_place=gradient.step_place,
            )
        )

    def _is_member(self, worker: RemoteWorker) -> bool:
        return self._groups.members.get(worker.worker) is worker

    @contextmanager
    def _busy(self) -> Iterator[None]:
        was_busy, self.is_busy = self.is_busy, True
        try:
            yield
        finally:
            self.is_busy = was_busy
