"""Replay of a trace: the row that each task of a run takes."""

import warnings
from bisect import bisect_right
from operator import attrgetter

from paceline.clusters.timing.survival import impute_censored
from paceline.clusters.timing.trace import Trace, TraceRow
from paceline.errors import PacelineWarning, RunError
from paceline.utils.wording import counted

SLACK = 0.1
FILL_IN = 'give censored="km" to draw such times from a Kaplan-Meier fit'


class TraceReplay:
    """Replay of the rows of a trace for the tasks of a run.

    Args:
        trace: trace to replay.
        seed: seed of the run, >= 0, for times sampled in place of censored ones.
    """

    def __init__(self, trace: Trace, seed: int) -> None:
        rows = impute_censored(trace.rows, seed) if trace.censored == "km" else trace.rows
        self._trace = trace
        self._has_warned = False
        self._rows: list[list[TraceRow]] = [[] for _ in range(trace.workers)]
        for row in rows:
            self._rows[row.worker].append(row)
        for own in self._rows:
            if own[-1].censored:
                own[-1] = _completed(own)
            own[:] = _with_sums(own)
        self._begin_s = min(row.start_s for row in rows)
        self._length_s = max(row.end_s for row in rows) - self._begin_s
        if trace.by == "time":
            for own in self._rows:
                own.sort(key=attrgetter("start_s"))

    def row(self, worker: int, draw: int, start_s: float) -> TraceRow:
        """Return the row of a draw that starts at second ``start_s``."""
        return self._by_time(worker, start_s) if self._trace.by == "time" else self._by_draw(worker, draw)

    def parts_s(self, worker: int, draw: int, start_s: float) -> tuple[float, float, float]:
        """Return the seconds of pull, compute and push; a censored row takes a tenth longer than observed.

        The time outside the recorded parts, in the queue of the server and for the update, counts as push. So the round
        trip takes as long as in the recorded run.
        """
        row = self.row(worker, draw, start_s)
        if row.censored:
            return 0.0, row.total_s * (1 + SLACK), 0.0
        if not self._trace.has_server:  # the time outside the parts was waiting for other workers
            transfer_s = row.sum_s / 2 if self._trace.sums_as_transfers else 0.0
            return transfer_s, row.compute_s, transfer_s
        return row.pull_s, row.compute_s, max(0.0, row.push_s + row.waited_s)

    def sum_s(self, worker: int, draw: int, start_s: float) -> float:
        """Return the seconds of the sum after this draw: those of its row, or of the row before."""
        return self.row(worker, draw, start_s).sum_s

    def confirm(self, worker: int, draw: int, start_s: float) -> None:
        """Raise a RunError if the row is censored, because the run waits longer than the recorded one."""
        row = self.row(worker, draw, start_s)
        if row.censored:
            raise RunError(
                f"worker {worker} has computed draw {draw} since {start_s:.6g} s; in {self._trace.source} the work was "
                f"interrupted after {row.total_s:.6g} s, but this run waits longer: {FILL_IN}"
            )

    def _by_draw(self, worker: int, draw: int) -> TraceRow:
        rows = self._rows[worker]
        if draw > len(rows) and not self._has_warned:
            self._wrap(f"worker {worker} repeats its {counted(len(rows), 'row')} from draw {draw} on")
        return rows[(draw - 1) % len(rows)]

    def _by_time(self, worker: int, start_s: float) -> TraceRow:
        rows = self._rows[worker]
        if start_s >= self._length_s and not self._has_warned:
            self._wrap(f"its {self._length_s:.6g} s repeat")
        at_s = self._begin_s + start_s % self._length_s
        return rows[max(0, bisect_right(rows, at_s, key=attrgetter("start_s")) - 1)]

    def _wrap(self, how: str) -> None:
        self._has_warned = True
        warnings.warn(f"the run is longer than {self._trace.source}: {how}", PacelineWarning, stacklevel=2)


def _with_sums(rows: list[TraceRow]) -> list[TraceRow]:
    """Return the rows with the seconds of a sum in each, for a run with more sums than the recorded one."""
    sum_s = next((row.sum_s for row in rows if row.sum_s), 0.0)
    done = []
    for row in rows:
        sum_s = row.sum_s or sum_s
        done.append(row._replace(sum_s=sum_s) if row.sum_s != sum_s else row)
    return done


def _completed(rows: list[TraceRow]) -> TraceRow:
    """Return a worker's last row, which the end of the recording cut off, with the length of its first row or more."""
    first, last = rows[0], rows[-1]
    total_s = max(first.total_s, last.total_s * (1 + SLACK))
    return last._replace(compute_s=total_s, end_s=last.start_s + total_s, censored=0)
