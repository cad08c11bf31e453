"""How busy the server's link is going to be, from the first gradients of most workers."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from paceline.utils.wording import counted

BUSIEST = 0.5  # beyond which workers that send at random moments wait for each other about as long as they send
PATIENCE = 4  # gradients of a worker, on average, after which one that has not been heard is not waited for


def share_busy(n: int, nbytes: int, compute_s: float, bytes_per_s: float) -> float:
    """Return the share of time in which each direction of the server's link is busy if no worker ever waits.

    With t = nbytes / bytes_per_s, a worker is through after compute_s + 2 t and needs each direction for t, so the
    share is n t / (compute_s + 2 t); above 1 workers have to wait, whatever the protocol.

    Args:
        n: workers, >= 1.
        nbytes: of a version, and of a gradient, on the wire.
        compute_s: seconds to compute a gradient, >= 0.
        bytes_per_s: in each direction, > 0.

    >>> share_busy(4, 4_000_000, 0.1, 400e6)
    0.3333333333333333
    """
    moving_s = nbytes / bytes_per_s
    return n * moving_s / (compute_s + 2 * moving_s)


def slices_for(n: int, nbytes: int, compute_s: float, bytes_per_s: float) -> int:
    """Return how many servers, each with its part of the vector, would be busy for half of the time at most.

    The smallest m with n t / m <= (compute_s + 2 t / m) / 2, >= 1; no number helps where nothing is computed: n then.

    >>> slices_for(64, 2_000_000_000, 10.0, 3e9)
    9
    """
    excess_s = nbytes / bytes_per_s * (n - 2 * BUSIEST)
    wanted = excess_s / (BUSIEST * compute_s) if compute_s > 0 else n
    return max(1, min(n, ceil(wanted)))


class LinkMonitor:
    """Waits for the first gradients of most workers and tells how busy the links of the servers are going to be.

    The upper median of the times to compute is known as soon as more than half of the workers have been heard, for
    the slow ones come last. Whoever is lost before it is heard is not waited for, nor who is always interrupted.

    Args:
        n: workers.
        slices: bytes of each slice of a version, and of a gradient, on the wire.
        bytes_per_s: of a server's link in each direction; None to go by the fastest exchange among those first ones.
    """

    def __init__(self, n: int, slices: Sequence[int], bytes_per_s: float | None) -> None:
        self._n = n
        self._slices = len(slices)
        self._nbytes = sum(slices)
        self._largest = max(slices)
        self._given = bytes_per_s
        self._first: dict[int, tuple[float, float]] = {}
        self._lost: set[int] = set()
        self._gradients = 0
        self._is_told = False
        self.is_bottleneck = False

    def hear(self, worker: int, compute_s: float, network_s: float) -> str | None:
        """Take in a gradient and return what is to be told, once, when those of most workers have come.

        Args:
            worker: whose.
            compute_s: seconds to compute it.
            network_s: seconds that its version and the gradient itself were on their way.
        """
        self._gradients += 1
        self._first.setdefault(worker, (compute_s, network_s))
        return self._told()

    def lose(self, worker: int) -> str | None:
        """Take note that a worker is gone, and return what is to be told if nobody else was waited for."""
        if worker not in self._first:
            self._lost.add(worker)
        return self._told()

    def tell_at_last(self) -> str | None:
        """Return what is to be told when the run is over and it has not been told yet, from what has been heard."""
        return self._sentence() if self._first and not self._is_told else None

    def _told(self) -> str | None:
        is_known = len(self._first) > self._awaited // 2 or self._gradients >= PATIENCE * self._n
        return self._sentence() if self._first and is_known and not self._is_told else None

    @property
    def _awaited(self) -> int:
        return self._n - len(self._lost - self._first.keys())

    def _sentence(self) -> str:
        self._is_told = True
        times = sorted(seconds for seconds, _ in self._first.values())
        compute_s = times[min(self._awaited // 2, len(times) - 1)]
        fastest_s = max(1e-9, min(seconds for _, seconds in self._first.values()))
        bytes_per_s = self._given or 2 * self._largest / fastest_s
        share = share_busy(self._n, self._largest, compute_s, bytes_per_s)
        link = "the server's link" if self._slices == 1 else f"the busiest link of {self._slices} servers"
        return (
            f"{link} will be busy {share:.0%} of the time{' (workers will wait)' if share > 1 else ''}: "
            f"{counted(self._n, 'worker')}, {self._nbytes / 1e6:.3g} MB each way a gradient, "
            f"{compute_s:.3g} s to compute it, "
            f"{bytes_per_s / 1e6:.3g} MB/s {'given' if self._given else 'measured'}; "
            f"{self._advice(slices_for(self._n, self._nbytes, compute_s, bytes_per_s))}"
        )

    def _advice(self, wanted: int) -> str:
        are = "is" if self._slices == 1 else "are"
        self.is_bottleneck = wanted > self._slices
        if self.is_bottleneck:
            return f"slices={wanted} would be better, there {are} {self._slices}"
        if wanted < self._slices:
            return f"slices={wanted} would do, there {are} {self._slices}"
        return f"slices={wanted}, as there {are}, will do"
