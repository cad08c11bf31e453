"""Supervisor of ranks whose launcher is paceline: events of their processes in, actions out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Self

from paceline.clusters.placement import Placement, actor_environment
from paceline.clusters.rank_restarts import EndRank, MakeRank, RankRestarts, Return
from paceline.errors import PacelineError, RunError, UsageError
from paceline.utils.rank_logger import RankLogger
from paceline.utils.user_code import RemoteTracebackError, report_of
from paceline.utils.wording import join_words, listed

LOG = RankLogger(__name__)
GRACE_S = 5.0  # in which the loss of another rank may explain a RunError
REMINDER_S = 30.0  # between two warnings about ranks that are missing


@dataclass(frozen=True)
class TrainRank:
    """Let the process of a rank train, with these launch variables."""

    rank: int
    environment: Mapping[str, str] = field(repr=False)  # it has the token


@dataclass(frozen=True)
class InterruptRank0:
    """Ask rank 0 to save the run and to end it."""


SupervisorAction = MakeRank | TrainRank | EndRank | InterruptRank0


@dataclass(frozen=True)
class StartCondition:
    """Condition under which a run begins.

    Attributes:
        ranks: number of the first ranks, >= 1; the run begins when all of them are there.
        least: number of them that are enough when the timeout has passed.
        timeout_s: seconds within which they must be there, > 0.
    """

    ranks: int
    least: int
    timeout_s: float


@dataclass(frozen=True)
class RankFailure:
    """Exception in the process of a rank.

    Attributes:
        message: message of the exception.
        details: its traceback.
        kind: "usage" for a UsageError, "run" for a RunError, and "code" for any other exception.
    """

    message: str
    details: str
    kind: Literal["usage", "run", "code"]

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return what the driver is sent of an exception."""
        message = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        if isinstance(error, UsageError):
            return cls(message, report_of(error), "usage")
        return cls(message, report_of(error), "run" if isinstance(error, RunError) else "code")

    def error(self, rank: int, advice: str) -> PacelineError:
        """Return the exception that the driver raises.

        Args:
            rank: number of the rank.
            advice: what to do after a failure in the code of the user.
        """
        if self.kind == "usage":
            return UsageError(self.message)
        error = RunError(self.message if self.kind == "run" else f"rank {rank} failed: {self.message}; {advice}")
        error.__cause__ = RemoteTracebackError(self.details)
        return error


class RankSupervisor:
    """Supervisor of the ranks of one run: decides which processes are made and made again, and when the run fails.

    The run begins with the first ranks. The late ones are made as soon as these train, and each joins when it is there;
    the run does not wait for them.

    A rank that is lost is made again. If rank 0 is lost, or a rank of those that cannot go on without each other, all
    are made again. An exception in a rank ends the run. A RunError often follows from the loss of another rank, so it
    counts only if no such loss is reported within `GRACE_S`.

    The caller has the processes and the clock: it passes events with their time in seconds, and carries out the
    actions. A method raises the error with which the run ends.

    Args:
        resources: resources that Ray reserves for each rank, by name; one or more ranks.
        token: token of the run.
        start: condition under which the run begins.
        max_restarts: number of times that each rank is made again, >= 0; -1 for no limit.
        folder: folder of the run; empty if it is not recorded.
        may_spread: whether the first ranks may be on several hosts, now or later.
        falls_together: whether no rank can go on after the loss of another.
    """

    def __init__(
        self,
        resources: Sequence[Mapping[str, float]],
        token: str,
        start: StartCondition,
        *,
        max_restarts: int,
        folder: str,
        may_spread: bool,
        falls_together: bool,
    ) -> None:
        self._resources = resources
        self._token = token
        self._start = start
        self._late = range(start.ranks, len(resources))
        self._restarts = RankRestarts(max_restarts)
        self._folder = folder
        self._may_spread = may_spread
        self._falls_together = falls_together
        self._starts = 0
        self._failure: PacelineError | None = None  # raised when rank 0 has ended
        self._is_stopping = False
        self._deadline_s = self._reminder_s = inf
        self._placement: Placement | None = None  # until the run begins
        self._port = 0
        self._hosts: dict[int, str] = {}
        self._run_errors: dict[int, tuple[RankFailure, float]] = {}  # with the end of their grace

    def begin(self, now: float) -> list[SupervisorAction]:
        """Make the first ranks, in place of all that exist."""
        late = self._late if self._starts else ()
        self._starts += 1
        self._deadline_s = now + self._start.timeout_s
        self._reminder_s = now + REMINDER_S
        self._placement = None
        self._hosts = {}
        self._run_errors = {}
        return [*map(EndRank, late), *map(MakeRank, range(self._start.ranks))]

    def on_made(self, rank: int, host: str, port: int) -> list[SupervisorAction]:
        """Handle the process of a rank that is there, on a host with a free port."""
        self._hosts[rank] = host
        if rank == 0:
            self._port = port
        if self._placement is not None:
            self._placement = self._placement.replaced({rank: host})
            return [self._train(self._placement, rank)]
        return self._train_all() if len(self._hosts) == self._start.ranks else []

    def on_lost(self, rank: int, reason: str, now: float) -> list[SupervisorAction]:
        """Handle the end of the process of a rank before the end of the run.

        Raises:
            RunError: the run cannot go on without the rank.
            KeyboardInterrupt: rank 0 has ended on request, but has not saved the run.
        """
        self._hosts.pop(rank, None)
        if self._is_stopping:
            if rank == 0:
                raise self._failure or KeyboardInterrupt
            return []
        has_begun = self._placement is not None
        others_go_on = has_begun and rank > 0 and not self._falls_together
        most = self._restarts.max_restarts
        match self._restarts.after_loss(rank, others_go_on=others_go_on, has_begun=has_begun):
            case Return.WITHOUT:
                LOG.warning("rank %d is gone, after max_restarts=%d: %s", rank, most, reason)
                return []
            case Return.NEVER:
                again = self._resume(", and train again")
                raise RunError(f"rank {rank} is gone: {reason}; give pl.Ray a max_restarts above {most}{again}")
            case Return.ALONE:
                LOG.warning("rank %d is made again: %s", rank, reason)
                return [MakeRank(rank)]
        goes_on = "goes on from its last checkpoint" if self._folder else "begins anew: give out= to have checkpoints"
        LOG.warning("rank %d is gone: %s; all ranks are made again, and the run %s", rank, reason, goes_on)
        return self.begin(now)

    def on_failed(self, rank: int, failure: RankFailure, now: float) -> list[SupervisorAction]:
        """Handle an exception in a rank.

        Raises:
            PacelineError: the run ends with it.
        """
        if failure.kind == "run":
            self._run_errors[rank] = (failure, now + GRACE_S)
            return []
        return self._fail(rank, failure)

    def on_ended(self, reason: str, now: float, *, is_interrupted: bool) -> list[SupervisorAction]:
        """Handle the result of rank 0: without actions it is the result of the run.

        A signal that this supervisor has not asked for interrupts rank 0 where its machine is taken away.

        Raises:
            PacelineError: the run was ended after this error.
        """
        if self._failure is not None:
            raise self._failure
        is_taken_away = is_interrupted and not self._is_stopping and self._restarts.may_return(0)
        return self.on_lost(0, reason, now) if is_taken_away else []

    def on_time(self, now: float) -> list[SupervisorAction]:
        """Handle what is due.

        Raises:
            PacelineError: the run ends with it.
        """
        if self._placement is None:
            if now > self._deadline_s:
                return self._start_without_missing()
            self._remind(now)
        due = [rank for rank, (_, until_s) in self._run_errors.items() if now > until_s]
        if not due:
            return []
        rank = min(due)
        failure, _ = self._run_errors.pop(rank)
        return self._fail(0, failure) if rank == 0 else self.on_lost(rank, failure.message, now)

    def stop(self) -> list[SupervisorAction]:
        """End the run at the request of the user.

        Raises:
            KeyboardInterrupt: the run has not begun.
        """
        if self._placement is None:
            raise KeyboardInterrupt
        return self._interrupt()

    def _start_without_missing(self) -> list[SupervisorAction]:
        if 0 in self._hosts and len(self._hosts) >= self._start.least:
            return self._train_all()
        raise RunError(
            f"Ray has not made {self._missing()} within start_timeout_s={self._start.timeout_s:g}: ray status shows "
            "what is free; give fewer workers or smaller resources"
        )

    def _remind(self, now: float) -> None:
        """Log which ranks are missing, each `REMINDER_S`."""
        if now >= self._reminder_s:
            self._reminder_s = now + REMINDER_S
            waited_s = now - self._deadline_s + self._start.timeout_s
            LOG.warning(
                "Ray has not made %s for %.0f s: ray status shows what is free; the run waits for start_timeout_s=%g",
                self._missing(),
                waited_s,
                self._start.timeout_s,
            )

    def _missing(self) -> str:
        """Return the names of the first ranks that are missing."""
        return self._names(rank for rank in range(self._start.ranks) if rank not in self._hosts)

    def _names(self, ranks: Iterable[int]) -> str:
        """Return the names of ranks, with the resources of each."""
        found: dict[str, list[int]] = {}
        for rank in ranks:
            found.setdefault(str(dict(self._resources[rank])), []).append(rank)
        return join_words(f"{listed('rank', ranks)} (resources {each})" for each, ranks in found.items())

    def _train_all(self) -> list[SupervisorAction]:
        """Begin the run with the ranks that are there, and make the late ones."""
        hosts = tuple(self._hosts.get(rank, "") for rank in range(len(self._resources)))
        may_spread = self._may_spread or "" in hosts
        self._placement = placement = Placement(
            hosts=hosts, port=self._port, starts=self._starts, may_spread=may_spread, late=len(self._late)
        )
        if self._late:
            LOG.info("the run begins; %s may join when Ray has resources", self._names(self._late))
        return [*(self._train(placement, rank) for rank in sorted(self._hosts)), *map(MakeRank, self._late)]

    def _train(self, placement: Placement, rank: int) -> TrainRank:
        return TrainRank(rank, actor_environment(placement, rank, self._token))

    def _fail(self, rank: int, failure: RankFailure) -> list[SupervisorAction]:
        """End the run because of an exception: at once if rank 0 has ended, else when it has saved the run."""
        error = failure.error(rank, f"correct the code, and train again{self._resume('')}")
        if rank == 0 or self._placement is None or 0 in self._run_errors:
            raise self._failure or error
        LOG.error("rank %d failed: %s", rank, failure.message)
        self._failure = self._failure or error
        return self._interrupt()

    def _interrupt(self) -> list[SupervisorAction]:
        if self._is_stopping:
            return []
        self._is_stopping = True
        return [InterruptRank0()]

    def _resume(self, before: str) -> str:
        return f"{before} with resume={self._folder!r}" if self._folder else before
