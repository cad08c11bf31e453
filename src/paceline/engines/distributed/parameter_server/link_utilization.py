"""Expected utilization of the server's link, estimated from the first gradients of most workers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from paceline.utils.wording import counted

BUSIEST = 0.5  # utilization beyond which workers that send at random wait about as long as they send
MEASURABLE_BYTES = 100_000  # the time of a shorter transfer is latency, from which no bandwidth follows
MAX_GRADIENTS = 4  # per worker on average, after which the estimate no longer waits for further workers


def link_utilization(n: int, nbytes: int, compute_s: float, bytes_per_s: float) -> float:
    """Return the share of time in which each direction of the server's link is busy if no worker ever waits.

    With t = nbytes / bytes_per_s, a worker's round trip takes compute_s + 2 t and uses each direction for t, so the
    share is n t / (compute_s + 2 t). Above 1, workers have to wait under any protocol.

    Args:
        n: number of workers, >= 1.
        nbytes: bytes of a version, and of a gradient, on the wire.
        compute_s: seconds to compute a gradient, >= 0.
        bytes_per_s: bandwidth in each direction, in bytes per second, > 0.

    >>> link_utilization(4, 4_000_000, 0.1, 400e6)
    0.3333333333333333
    """
    moving_s = nbytes / bytes_per_s
    return n * moving_s / (compute_s + 2 * moving_s)


def recommended_shards(n: int, nbytes: int, compute_s: float, bytes_per_s: float) -> int:
    """Return the smallest number of servers, each with one shard, whose links are busy at most half of the time.

    The smallest m with n t / m <= (compute_s + 2 t / m) / 2, >= 1; n if compute_s is 0, where no m suffices.

    >>> recommended_shards(64, 2_000_000_000, 10.0, 3e9)
    9
    """
    excess_s = nbytes / bytes_per_s * (n - 2 * BUSIEST)
    wanted = excess_s / (BUSIEST * compute_s) if compute_s > 0 else n
    return max(1, min(n, ceil(wanted)))


class LinkMonitor:
    """Estimator of link utilization from the first gradients of most workers.

    The upper median of the compute times is known when more than half of the workers have sent a gradient, because the
    slow ones come last. Workers that are lost, or always interrupted, before their first gradient are left out.

    Args:
        n: number of workers.
        shards: bytes of each shard of a version, and of a gradient, on the wire.
        bytes_per_s: bandwidth of a server's link in each direction; None to use the fastest of the first transfers,
            without a report if they are too short for that.

    Attributes:
        is_bottleneck: whether more shards are recommended than there are.
    """

    def __init__(self, n: int, shards: Sequence[int], bytes_per_s: float | None) -> None:
        self._n = n
        self._shards = len(shards)
        self._nbytes = sum(shards)
        self._largest = max(shards)
        self._given = bytes_per_s
        self._first: dict[int, tuple[float, float]] = {}
        self._lost: set[int] = set()
        self._gradients = 0
        self._has_reported = bytes_per_s is None and self._largest < MEASURABLE_BYTES  # there is nothing to report
        self.is_bottleneck = False

    def on_gradient(self, worker: int, compute_s: float, network_s: float) -> str | None:
        """Record a gradient; return the report, once, when most workers have sent one.

        Args:
            worker: number of the worker.
            compute_s: seconds to compute the gradient.
            network_s: seconds to transfer its version and the gradient itself.
        """
        self._gradients += 1
        self._first.setdefault(worker, (compute_s, network_s))
        return self._report_if_known()

    def on_lost(self, worker: int) -> str | None:
        """Record the loss of a worker; return the report if only this worker was missing for it."""
        if worker not in self._first:
            self._lost.add(worker)
        return self._report_if_known()

    def final_report(self) -> str | None:
        """Return the report at the end of the run if it was not made before."""
        return self._report() if self._first and not self._has_reported else None

    def _report_if_known(self) -> str | None:
        is_known = len(self._first) > self._awaited // 2 or self._gradients >= MAX_GRADIENTS * self._n
        return self._report() if self._first and is_known and not self._has_reported else None

    @property
    def _awaited(self) -> int:
        return self._n - len(self._lost - self._first.keys())

    def _report(self) -> str:
        self._has_reported = True
        times = sorted(seconds for seconds, _ in self._first.values())
        compute_s = times[min(self._awaited // 2, len(times) - 1)]
        fastest_s = max(1e-9, min(seconds for _, seconds in self._first.values()))
        bytes_per_s = self._given or 2 * self._largest / fastest_s  # a version and a gradient take that time
        share = link_utilization(self._n, self._largest, compute_s, bytes_per_s)
        wanted = recommended_shards(self._n, self._nbytes, compute_s, bytes_per_s)
        self.is_bottleneck = wanted > self._shards
        link = "server link" if self._shards == 1 else f"busiest link of {self._shards} servers"
        return (
            f"{link} about {share:.0%} busy{' (workers will wait)' if share > 1 else ''}, "
            f"shards={wanted} {'recommended' if self.is_bottleneck else 'is enough'} (now {self._shards}): "
            f"{counted(self._n, 'worker')}, {self._nbytes / 1e6:.3g} MB per gradient in each direction, "
            f"{compute_s:.3g} s to compute one, "
            f"{bytes_per_s / 1e6:.3g} MB/s {'given' if self._given else 'measured'}"
        )
