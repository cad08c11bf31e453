"""Supervisor of the ranks that `paceline run` starts on one host: events of their processes in, actions out."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from paceline.clusters.launch_env import BOUND, ENDED, STANDBY, SURVIVES
from paceline.clusters.rank_restarts import MOST_FAILURES, WORK_S, EndRank, MakeRank, RankRestarts, Return, pause_s
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
SAME_SIGNAL_S = 1.0  # in which a program that ends another one, such as timeout, may send it several signals
OF_SCRIPTS = (signal.SIGUSR1, signal.SIGUSR2)  # signals that a script may handle, and that say nothing to the launcher
LOOK_S = 10.0  # between two looks at a rank that is stopped
LATE_S = 10.0  # for the other ranks to end after the run
UNREACHABLE_S, RETRY_S = 60.0, 1.0  # for the launcher on the host of rank 0 to answer
USAGE_STATUS = 2  # of a wrong command, which would be as wrong when it is started again
INTERRUPTED_STATUS = 130
LEFT_STATUS = 128 + signal.SIGTERM  # of a rank that has left the run on SIGTERM


@dataclass(frozen=True)
class KillRank:
    """Kill the process of a rank, and all that it has started, at once."""

    rank: int


@dataclass(frozen=True)
class PassSignal:
    """Send a signal to the process of a rank."""

    rank: int
    number: int


LaunchAction = MakeRank | EndRank | KillRank | PassSignal


class RankPhase(Enum):
    """RankPhase of the process of a rank."""

    RUNNING = auto()
    ENDING = auto()  # it was asked to end
    WAITING = auto()  # it is started again after a pause
    DONE = auto()  # its status counts
    GONE = auto()  # the others have gone on without it


@dataclass(kw_only=True)
class RankAccount:
    """Account of the processes of one rank.

    Attributes:
        phase: phase of the last one.
        status: its status, when it has ended.
        started_s: when it was made.
        ended_s: when it has ended.
        due_s: when the next one is made.
        starts: number of processes so far.
        stopped_s: when it was found to be stopped; inf while it runs.
        look_s: when it is looked at again; inf while it runs.
        losses: number of those that were lost, in a row, before they had worked for `WORK_S`.
        failures: number of those that ended with a status of their own before that, in a row.
    """

    phase: RankPhase = RankPhase.WAITING
    status: int = 0
    started_s: float = inf
    ended_s: float = inf
    due_s: float = inf
    starts: int = 0
    stopped_s: float = inf
    look_s: float = inf
    losses: int = 0
    failures: int = 0


class LaunchSupervisor:
    """Supervisor of the ranks of one host: decides which are started again, and with which status the launcher ends.

    A rank that is lost is started again with its number, after a pause that doubles with each loss, and the others go
    on. If rank 0 is lost, all are started again, unless its standby goes on. Ranks in a process group of torch are all
    started again, whichever is lost. A rank that fails `MOST_FAILURES` times in a row, each within a minute of its
    start, is not started again; if none has worked for a minute by then, the script is wrong, and the launcher ends.

    The run ends with rank 0, or with the first rank that ends after a standby has taken its place. The status of the
    launcher is that of rank 0, or that of a rank that fails afterwards.

    The caller has the processes and the clock: it passes events with their time in seconds, and carries out the
    actions. It reports the end of a rank that it was to end as `on_ended`, and any other end as `on_exit`. Statuses are
    those of `subprocess`: the negative number of a signal for a process that was killed.

    Args:
        ranks: numbers of the ranks of this host, one or more.
        max_restarts: number of times that each rank is started again, >= 0; -1 for no limit.
        first_pause_s: seconds before a rank is started again for the first time, >= 0.
    """

    def __init__(self, ranks: Sequence[int], max_restarts: int, first_pause_s: float = 1.0) -> None:
        self._ranks = {rank: RankAccount() for rank in ranks}
        self._restarts = RankRestarts(max_restarts)
        self._first_pause_s = first_pause_s
        self._again_s: float | None = None  # when all are started again, if they have ended
        self._over_s: float | None = None  # when rank 0 has ended
        self._rest_s = inf  # when the ranks that are left are ended
        self._signal_s = -inf  # when the last signal came
        self._is_closing = False
        self._verdict: int | None = None  # status of the launcher, whatever the ranks end with
        self._has_worked = False
        self._has_successor = False  # of rank 0

    @property
    def status(self) -> int | None:
        """Exit status of the launcher; None while there is something to do."""
        if self._in(RankPhase.RUNNING, RankPhase.ENDING, RankPhase.WAITING):
            return None
        if self._verdict is not None:
            return self._verdict
        ended = self._in(RankPhase.DONE) or self._in(RankPhase.GONE)
        return next((exit_status(each.status) for each in map(self._ranks.__getitem__, ended) if each.status), 0)

    @property
    def wake_s(self) -> float:
        """Time at which `on_time` has something to do; inf if it waits for an event."""
        look_s = min(each.look_s for each in self._ranks.values())
        due_s = [self._ranks[rank].due_s for rank in self._in(RankPhase.WAITING)]
        return min([self._rest_s, look_s, *due_s])

    def begin(self, now: float) -> list[LaunchAction]:
        """Start all ranks of this host."""
        return [self._make(rank, now) for rank in self._ranks]

    def on_exit(self, rank: int, status: int, now: float, told: Collection[str] = ()) -> list[LaunchAction]:
        """Handle the end of a rank.

        Args:
            rank: rank whose process has ended.
            status: its status.
            now: time in seconds.
            told: what ranks have told about the run: `STANDBY` if rank 0 has one, `ENDED` if the run has ended, `BOUND`
                if no rank can go on without another, `SURVIVES` if those that are left can nevertheless.
        """
        self._note_work(now)
        each = self._ranks[rank]
        each.status = status
        each.ended_s = now
        is_interrupted = status == INTERRUPTED_STATUS or (rank == 0 and status == LEFT_STATUS)
        if self._is_closing or status == 0 or is_interrupted:
            each.phase = RankPhase.DONE
            if rank == 0 or self._has_successor or self._is_without_rank_0:
                self._end_run(now, is_whole=status == 0)
        elif self._over_s is not None:
            LOG.warning("rank %d %s, after the end of rank 0", rank, describe_end(status))
            each.phase = RankPhase.GONE if self._is_late(rank) else RankPhase.DONE
        elif rank == 0 and ENDED in told:
            return self._fail(rank, f"rank 0 {describe_end(status)} after the end of the run; it is not started again")
        elif rank == 0 and STANDBY in told:
            LOG.warning("rank 0 %s; its standby goes on", describe_end(status))
            each.phase = RankPhase.GONE
            self._has_successor = True
        else:
            survives = SURVIVES in told
            return self._lose(rank, now, is_bound=BOUND in told and not survives, survives=survives)
        return []

    def on_ended(self, rank: int, now: float) -> list[LaunchAction]:
        """Handle the end of a rank that was to end, with all that it has started."""
        each = self._ranks[rank]
        each.phase = RankPhase.GONE
        each.status = -signal.SIGTERM
        if self._again_s is not None and not self._in(RankPhase.ENDING):
            for other in self._ranks.values():
                other.phase = RankPhase.WAITING
                other.due_s = max(self._again_s, now)
            self._again_s = None
        return []

    def on_stopped(self, ranks: Collection[int], now: float, silence_s: float) -> list[LaunchAction]:
        """Handle that some ranks are stopped by a signal, and the others are not: one that stays so is ended.

        Args:
            ranks: ranks whose processes are stopped.
            now: time in seconds.
            silence_s: seconds for which one may be so, > 0; inf if the others cannot go on without it.
        """
        actions: list[LaunchAction] = []
        for rank, each in self._ranks.items():
            is_stopped = rank in ranks and each.phase is RankPhase.RUNNING
            each.stopped_s = min(each.stopped_s, now) if is_stopped else inf
            if now >= each.stopped_s + silence_s:
                LOG.warning("rank %d was stopped for %.3g s, and is ended", rank, now - each.stopped_s)
                actions.append(KillRank(rank))
                each.stopped_s = inf
            # The ranks may allow another silence meanwhile, since that follows the times of their updates.
            each.look_s = min(now + LOOK_S, each.stopped_s + silence_s) if each.stopped_s < inf else inf
        return actions

    def on_unreachable(self, rank: int, now: float) -> list[LaunchAction]:
        """Handle a rank that cannot be started again, because the launcher on the host of rank 0 does not answer."""
        each = self._ranks[rank]
        each.starts -= 1  # `_make` has counted one that was not made
        if now < each.ended_s + UNREACHABLE_S:
            each.phase = RankPhase.WAITING
            each.due_s = now + RETRY_S
            return []
        return self._fail(
            rank, f"rank {rank} {describe_end(each.status)}, and the launcher on the host of rank 0 does not answer"
        )

    def on_signal(self, number: int, now: float) -> list[LaunchAction]:
        """Handle a signal to the launcher: the first is passed on, the second kills all ranks.

        One `OF_SCRIPTS` is passed on and ends nothing. A terminal that is closed (SIGHUP) ends the run as SIGTERM does,
        so that it is saved. Signals of a program that follow within `SAME_SIGNAL_S` are one; two Ctrl-C are two.
        """
        if number in OF_SCRIPTS:
            return [PassSignal(rank, number) for rank in self._in(RankPhase.RUNNING)]
        if number != signal.SIGINT and now < self._signal_s + SAME_SIGNAL_S:
            return []
        self._signal_s = now
        if self._is_closing:
            self._verdict = exit_status(-number)
            return [KillRank(rank) for rank in self._in(RankPhase.RUNNING, RankPhase.ENDING)]
        self._close(-number)
        passed = signal.SIGTERM if number == signal.SIGHUP else number
        return [PassSignal(rank, passed) for rank in self._in(RankPhase.RUNNING)]

    def on_time(self, now: float) -> list[LaunchAction]:
        """Handle what is due."""
        actions: list[LaunchAction] = [
            self._make(rank, now) for rank in self._in(RankPhase.WAITING) if now >= self._ranks[rank].due_s
        ]
        if now < self._rest_s:
            return actions
        self._rest_s = inf
        rest = [rank for rank in self._in(RankPhase.RUNNING) if self._is_closing or self._is_late(rank)]
        return [*actions, *self._end(rest)]

    @property
    def _is_without_rank_0(self) -> bool:
        first = self._ranks.get(0)
        return first is not None and first.phase in (RankPhase.WAITING, RankPhase.GONE)

    def _in(self, *phases: RankPhase) -> list[int]:
        return [rank for rank, each in self._ranks.items() if each.phase in phases]

    def _make(self, rank: int, now: float) -> MakeRank:
        each = self._ranks[rank]
        each.phase = RankPhase.RUNNING
        each.started_s = now
        each.starts += 1
        return MakeRank(rank)

    def _end(self, ranks: Iterable[int]) -> list[LaunchAction]:
        actions: list[LaunchAction] = []
        for rank in ranks:
            self._ranks[rank].phase = RankPhase.ENDING
            actions.append(EndRank(rank))
        return actions

    def _note_work(self, now: float) -> None:
        """Note which ranks have worked for so long that their earlier losses no longer count."""
        for rank in self._in(RankPhase.RUNNING):
            each = self._ranks[rank]
            if now - each.started_s >= WORK_S:
                each.losses = each.failures = 0
                self._has_worked = True

    def _is_late(self, rank: int) -> bool:
        """Return whether a rank was started again so late that it may look for a run that is over."""
        each = self._ranks[rank]
        return self._over_s is not None and each.starts > 1 and self._over_s - each.started_s < WORK_S

    def _end_run(self, now: float, *, is_whole: bool) -> None:
        """End the run: no rank is started again; an interrupted run ends for all."""
        if self._over_s is not None:
            return
        self._over_s = now
        self._rest_s = now + LATE_S
        if not is_whole:
            self._close(-signal.SIGTERM)
        self._give_up_waiting(-signal.SIGTERM)

    def _close(self, status: int) -> None:
        self._is_closing = True
        self._again_s = None
        self._give_up_waiting(status)

    def _give_up_waiting(self, status: int) -> None:
        for rank in self._in(RankPhase.WAITING):
            each = self._ranks[rank]
            each.phase = RankPhase.GONE
            each.status = status

    def _lose(self, rank: int, now: float, *, is_bound: bool, survives: bool) -> list[LaunchAction]:
        """Handle the end of a rank before that of the run; the loss of a bound rank is one of all ranks."""
        each = self._ranks[rank]
        is_failure = each.status > 0
        for lost in self._ranks.values() if is_bound else [each]:
            lost.losses += 1
            lost.failures = lost.failures + 1 if is_failure and now - each.started_s < WORK_S else 0
        how = f"rank {rank} {describe_end(each.status)}"
        if each.status == USAGE_STATUS and not self._has_worked:
            return self._fail(rank, f"{how}, as a wrong command does; it is not started again")
        if each.failures < MOST_FAILURES:
            limit = f"--max-restarts {self._restarts.max_restarts}"
            outcome = self._restarts.after_loss(
                min(self._ranks) if is_bound else rank, others_go_on=survives or (rank > 0 and not is_bound)
            )
        else:
            limit = f"{MOST_FAILURES} failures in a row, each within {WORK_S:g} s of its start"
            outcome = Return.WITHOUT if survives or (rank and not is_bound) else Return.NEVER
        is_script_wrong = is_failure and not self._has_worked and not survives
        if outcome is Return.NEVER or (outcome is Return.WITHOUT and is_script_wrong):
            return self._fail(rank, f"{how}, after {limit}: the run ends")
        if outcome is Return.WITHOUT:
            LOG.warning("%s, after %s: the others go on without it", how, limit)
            each.phase = RankPhase.GONE
            return []
        pause = pause_s(each.losses, self._first_pause_s)
        if outcome is Return.ALONE:
            LOG.warning("%s; it is started again in %g s", how, pause)
            each.phase = RankPhase.WAITING
            each.due_s = now + pause
            return []
        why = ", from the script's own checkpoint: no rank of DDP or FSDP goes on without another" if is_bound else ""
        LOG.warning("%s: all ranks of this host are started again in %g s%s", how, pause, why)
        self._again_s = now + pause
        return self._end(self._ranks)

    def _fail(self, rank: int, text: str) -> list[LaunchAction]:
        """End the launcher with the status of a rank."""
        LOG.error("%s", text)
        self._ranks[rank].phase = RankPhase.DONE
        self._verdict = exit_status(self._ranks[rank].status)
        self._close(-signal.SIGTERM)
        return self._end(self._in(RankPhase.RUNNING))


def exit_status(status: int) -> int:
    """Return the status of a process as a shell gives it.

    >>> exit_status(-9)
    137
    """
    return status if status >= 0 else 128 - status


def describe_end(status: int) -> str:
    """Return how a process has ended.

    >>> describe_end(-9)
    'was killed by SIGKILL'
    """
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
