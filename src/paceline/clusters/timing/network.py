"""Network and server models: the seconds of a round trip besides computing."""

from functools import cache
from math import inf

from paceline.core.wire import parse_wire
from paceline.errors import UsageError
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range


@checked_dataclass(frozen=True, kw_only=True)
class Network:
    """Link between a worker and the parameter server, the same for all workers, without congestion.

    ``seconds = latency_s + sent_bytes / bytes_per_s``

    Args:
        latency_s: seconds until the first byte, in each direction, >= 0.
        up_bytes_per_s: bandwidth from worker to server (push) in bytes per second, > 0, may be inf.
        down_bytes_per_s: bandwidth from server to worker (pull) in bytes per second, > 0, may be inf.
        wire: "float32" to send all bytes of the payload, or the code of float32 parameters and gradients: "int8",
            "int4" or "top_k(share=0.01)", as in `Torchrun`. Simulated training makes their rounding errors.

    >>> Network(latency_s=0.5, up_bytes_per_s=100).push_s(payload_bytes=50)
    1.0
    """

    latency_s: float = 0.0
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf
    wire: str = "float32"

    def __post_init__(self) -> None:
        check_range("[0, inf)", latency_s=self.latency_s)
        check_range("(0, inf]", up_bytes_per_s=self.up_bytes_per_s, down_bytes_per_s=self.down_bytes_per_s)
        if parse_wire(self.wire) is None and self.wire != "float32":
            raise UsageError(f"wire={self.wire!r} is not simulated; give float32, int8, int4 or top_k(share=0.01)")

    def sent_bytes(self, payload_bytes: float) -> float:
        """Return the bytes on the wire of a payload of float32 values.

        >>> Network(wire="int4").sent_bytes(1024)
        132.0
        """
        return payload_bytes * _byte_share(self.wire)

    def pull_s(self, payload_bytes: float) -> float:
        """Return the seconds of a pull: from the server's send of the parameters to their arrival at the worker."""
        return self.latency_s + self.sent_bytes(payload_bytes) / self.down_bytes_per_s

    def push_s(self, payload_bytes: float) -> float:
        """Return the seconds of a push: from the worker's send of a gradient to its arrival at the server."""
        return self.latency_s + self.sent_bytes(payload_bytes) / self.up_bytes_per_s

    def all_reduce_s(self, n: int, payload_bytes: float) -> float:
        """Return the seconds of a ring all-reduce over n workers, or of an all-gather of compressed messages.

        ``2 (n - 1) (latency_s + payload_bytes / n / bytes_per_s)`` with the slower of the two directions. Every worker
        sends chunks of 1 / n of the vector: n - 1 steps of reduce-scatter and n - 1 steps of all-gather.
        Compressed messages are not summed on their way: ``(n - 1) (latency_s + sent_bytes / bytes_per_s)``.

        >>> Network(latency_s=0.5, up_bytes_per_s=100).all_reduce_s(n=4, payload_bytes=400)
        9.0

        Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
        """
        bytes_per_s = min(self.up_bytes_per_s, self.down_bytes_per_s)
        if self.wire != "float32":
            return (n - 1) * (self.latency_s + self.sent_bytes(payload_bytes) / bytes_per_s)
        return 2 * (n - 1) * (self.latency_s + payload_bytes / n / bytes_per_s)


@cache
def _byte_share(wire: str) -> float:
    code = parse_wire(wire)
    return 1.0 if code is None else code.byte_share


@checked_dataclass(frozen=True)
class ServerTime:
    """Seconds that the parameter server is busy and serves no other request.

    Args:
        update_s: seconds per update (one optimizer step), >= 0.
        gradient_s: seconds per received gradient, >= 0.
    """

    update_s: float = 0.0
    gradient_s: float = 0.0

    def __post_init__(self) -> None:
        check_range("[0, inf)", update_s=self.update_s, gradient_s=self.gradient_s)
