"""Restart of all workers from a checkpoint when one of them fails: its time, simulated and in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, expm1


@dataclass(frozen=True)
class CheckpointRestart:
    """Training that stops when a worker fails, and starts again from the last checkpoint.

    The end of the work is a checkpoint too. A failure while the workers are down begins the wait for a worker and the
    restart anew.

    Args:
        interval_s: seconds of work between two checkpoints, > 0.
        away_s: seconds until the failed worker is back, or another one in its place, >= 0.
        restart_s: seconds more for detecting the failure, starting all workers and loading the checkpoint, >= 0.
        write_s: seconds for which training waits until a checkpoint is written, >= 0.
    """

    interval_s: float
    away_s: float
    restart_s: float
    write_s: float = 0.0

    @property
    def down_s(self) -> float:
        """Seconds from a failure to the next work."""
        return self.away_s + self.restart_s

    @property
    def mean_loss_s(self) -> float:
        """Seconds that a rare failure costs on average: half of an interval is repeated after the restart."""
        return (self.interval_s + self.write_s) / 2 + self.down_s

    def run_s(self, work_s: float, failures_s: Iterator[float]) -> float:
        """Return the seconds of a run.

        Args:
            work_s: seconds of a run without checkpoints and failures.
            failures_s: times of the failures of any worker, ascending and without end.
        """
        now_s, failed_s = 0.0, next(failures_s)
        for part_s in self._parts_s(work_s):
            while failed_s < now_s + part_s:
                now_s, failed_s = failed_s + self.down_s, next(failures_s)
            now_s += part_s
        return now_s

    def expected_s(self, work_s: float, mttf_s: float) -> float:
        """Return the mean of ``run_s`` if the times between failures are exponential.

        ``M * exp(R / M) * sum over the parts of (exp((tau + delta) / M) - 1)``

        M is the mean time to failure, R ``down_s``, delta ``write_s``, and a part has tau seconds of work, of which the
        last one may have less than the others.

        Args:
            work_s: seconds of a run without checkpoints and failures.
            mttf_s: mean time to failure of the cluster, > 0.

        Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
        """
        return mttf_s * exp(self.down_s / mttf_s) * sum(expm1(part_s / mttf_s) for part_s in self._parts_s(work_s))

    def _parts_s(self, work_s: float) -> list[float]:
        """Return the seconds from each checkpoint to the next one."""
        whole, rest_s = divmod(work_s, self.interval_s)
        lengths_s = [self.interval_s] * int(whole)
        if rest_s > 0:
            lengths_s.append(rest_s)
        return [length_s + self.write_s for length_s in lengths_s]


def best_interval_s(write_s: float, mttf_s: float) -> float:
    """Return the seconds between two checkpoints for which ``CheckpointRestart.expected_s`` is shortest.

    ``M * (1 + W(-exp(-1 - delta / M)))`` with Lambert's W, which solves ``1 - tau / M = exp(-(tau + delta) / M)``. For
    short writes it is about ``sqrt(2 * delta * M)``.

    Args:
        write_s: delta, seconds of writing a checkpoint, > 0.
        mttf_s: M, mean time to failure of the cluster, > 0.

    Source: Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly, 2006.
    """
    from scipy.special import lambertw

    return mttf_s * (1 + float(lambertw(-exp(-1 - write_s / mttf_s)).real))
