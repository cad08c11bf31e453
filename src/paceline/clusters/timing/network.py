"""What a round trip costs besides computing: the network, and the parameter server itself."""

from dataclasses import dataclass
from math import inf

from paceline.utils.argument_types import checked_types
from paceline.utils.validation import check_range


@checked_types
@dataclass(frozen=True)
class Network:
    """The link between a worker and the parameter server, the same for all workers and never congested.

    ``seconds = latency_s + payload_bytes / bytes_per_s``

    Args:
        latency_s: Seconds until the first byte, each way, >= 0.
        up_bytes_per_s: Bytes per second from worker to server (push), > 0, may be inf.
        down_bytes_per_s: Bytes per second from server to worker (pull), > 0, may be inf.

    >>> Network(latency_s=0.5, up_bytes_per_s=100).push_s(payload_bytes=50)
    1.0
    """

    latency_s: float = 0.0
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf

    def __post_init__(self) -> None:
        check_range("[0, inf)", latency_s=self.latency_s)
        check_range("(0, inf]", up_bytes_per_s=self.up_bytes_per_s, down_bytes_per_s=self.down_bytes_per_s)

    def pull_s(self, payload_bytes: float) -> float:
        """Return the seconds from the server's sending of the parameters to their arrival."""
        return self.latency_s + payload_bytes / self.down_bytes_per_s

    def push_s(self, payload_bytes: float) -> float:
        """Return the seconds from the worker's sending of a gradient to its arrival."""
        return self.latency_s + payload_bytes / self.up_bytes_per_s

    def all_reduce_s(self, n: int, payload_bytes: float) -> float:
        """Return the seconds in which n workers without a server sum their vectors, around a ring.

        ``2 (n - 1) (latency_s + payload_bytes / n / bytes_per_s)`` with the slower of the two directions: every worker
        passes on a piece of 1 / n, n - 1 times until it is summed up, and n - 1 times until everybody has it.

        >>> Network(latency_s=0.5, up_bytes_per_s=100).all_reduce_s(n=4, payload_bytes=400)
        9.0

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
        """
        bytes_per_s = min(self.up_bytes_per_s, self.down_bytes_per_s)
        return 2 * (n - 1) * (self.latency_s + payload_bytes / n / bytes_per_s)


@checked_types
@dataclass(frozen=True)
class ServerTime:
    """How long the parameter server is busy, while nothing else can be served.

    Args:
        update_s: Seconds per update (one optimizer step), >= 0.
        gradient_s: Seconds per gradient received, >= 0.
    """

    update_s: float = 0.0
    gradient_s: float = 0.0

    def __post_init__(self) -> None:
        check_range("[0, inf)", update_s=self.update_s, gradient_s=self.gradient_s)
