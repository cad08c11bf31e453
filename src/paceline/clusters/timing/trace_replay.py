"""Replaying a trace: which row a piece of work takes."""

import warnings
from bisect import bisect_right
from operator import attrgetter

from paceline.clusters.timing.survival import filled
from paceline.clusters.timing.trace import Trace, TraceRow
from paceline.errors import PacelineWarning, RunError
from paceline.utils.wording import counted

SLACK = 0.1
FILL_IN = 'censored="km" draws such times from a Kaplan-Meier fit'


class TraceReplay:
    """The rows of a trace as work of a run asks for them.

    Args:
        trace: to replay.
        seed: the run's, for times drawn in place of censored ones.
    """

    def __init__(self, trace: Trace, seed: int) -> None:
        rows = filled(trace.rows, seed) if trace.censored == "km" else trace.rows
        self._trace = trace
        self._has_warned = False
        self._rows: list[list[TraceRow]] = [[] for _ in range(trace.workers)]
        for row in rows:
            self._rows[row.worker].append(row)
        for own in self._rows:
            if own[-1].censored:
                own[-1] = _as_at_first(own)
            own[:] = _with_sums(own)
        self._begin_s = min(row.start_s for row in rows)
        self._length_s = max(row.end_s for row in rows) - self._begin_s
        if trace.by == "time":
            for own in self._rows:
                own.sort(key=attrgetter("start_s"))

    def row(self, worker: int, draw: int, start_s: float) -> TraceRow:
        """Return the row that a draw, begun at second ``start_s``, takes."""
        return self._by_time(worker, start_s) if self._trace.by == "time" else self._by_draw(worker, draw)

    def parts_s(self, worker: int, draw: int, start_s: float) -> tuple[float, float, float]:
        """Return the seconds of pulling, computing and pushing; a censored row takes a tenth longer than was seen.

        What the recorded parts leave over, waiting in the server's queue and the update, counts as pushing: then
        a round trip takes from being given the work to having it dealt with, as it did.
        """
        row = self.row(worker, draw, start_s)
        if row.censored:
            return 0.0, row.total_s * (1 + SLACK), 0.0
        if not self._trace.has_server:  # and what is left over was waiting for others
            return 0.0, row.compute_s, 0.0
        return row.pull_s, row.compute_s, max(0.0, row.push_s + row.waited_s)

    def sum_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return the seconds of a sum after this draw: the row's, or else as many as the one before it had."""
        return self.row(worker, draw, start_s).sum_s

    def confirm(self, worker: int, draw: int, start_s: float) -> None:
        """Raise a RunError if a censored row is waited for beyond its slack."""
        row = self.row(worker, draw, start_s)
        if row.censored:
            raise RunError(
                f"worker {worker} has computed draw {draw} since {start_s:.6g} s; in {self._trace.source} the work was "
                f"given up after {row.total_s:.6g} s, and here it is waited for longer: {FILL_IN}"
            )

    def _by_draw(self, worker: int, draw: int) -> TraceRow:
        rows = self._rows[worker]
        if draw > len(rows):
            self._wrap(f"worker {worker} takes its {counted(len(rows), 'row')} again from draw {draw} on")
        return rows[(draw - 1) % len(rows)]

    def _by_time(self, worker: int, start_s: float) -> TraceRow:
        rows = self._rows[worker]
        if start_s >= self._length_s:
            self._wrap(f"its {self._length_s:.6g} s begin again")
        at_s = self._begin_s + start_s % self._length_s
        return rows[max(0, bisect_right(rows, at_s, key=attrgetter("start_s")) - 1)]

    def _wrap(self, how: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = f"the run goes on beyond the end of {self._trace.source}: {how}"
            warnings.warn(text, PacelineWarning, stacklevel=2)


def _with_sums(rows: list[TraceRow]) -> list[TraceRow]:
    """Give every row the seconds of a sum, for a run that makes one where the recorded one made none."""
    sum_s = next((row.sum_s for row in rows if row.sum_s), 0.0)
    done = []
    for row in rows:
        sum_s = row.sum_s or sum_s
        done.append(row._replace(sum_s=sum_s) if row.sum_s != sum_s else row)
    return done


def _as_at_first(rows: list[TraceRow]) -> TraceRow:
    """Return a worker's last work, cut off by the end of the recording, as long as its first, or as was seen.

    Where the rows end they begin again, and this one was begun already.
    """
    first, last = rows[0], rows[-1]
    total_s = max(first.total_s, last.total_s * (1 + SLACK))
    return last._replace(compute_s=total_s, end_s=last.start_s + total_s, censored=0)
