"""Gradient buckets: ranges of a gradient that are sent while the backward pass still computes the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.tensors.flat_buffers import ALIGNMENT_BYTES

BUCKET_BYTES = 1 << 21
MAX_BUCKETS = 48


class Bucket(NamedTuple):
    """Contiguous range of the bytes on the wire.

    Attributes:
        start: first byte.
        stop: byte after the last one.

    >>> Bucket(0, 100).intersection(Bucket(64, 128))
    Bucket(start=64, stop=100)
    """

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Number of bytes; zero or negative for the intersection of two disjoint buckets."""
        return self.stop - self.start

    def intersection(self, other: Bucket) -> Bucket:
        """Return the bytes in both buckets."""
        return Bucket(max(self.start, other.start), min(self.stop, other.stop))

    def of(self, memory: Tensor) -> Tensor:
        """Return the bucket's part of the wire memory, uint8 [nbytes]."""
        return memory[self.start : self.stop]


def make_buckets(gradient_nbytes: int, nbytes: int, bucket_nbytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Return the buckets of a vector in the order in which a backward pass completes them: from its end.

    A vector of less than two buckets is one bucket. Otherwise the buffers, whose changes are known last, have a bucket
    of their own.

    Args:
        gradient_nbytes: bytes of the gradient, after which the buffers begin; a multiple of 64.
        nbytes: bytes of gradient and buffers.
        bucket_nbytes: approximate bytes of a bucket; larger if there would be more than `MAX_BUCKETS`.

    >>> make_buckets(256, 300, bucket_nbytes=100)
    [Bucket(start=128, stop=256), Bucket(start=0, stop=128), Bucket(start=256, stop=300)]
    """
    count = min(MAX_BUCKETS - 1, gradient_nbytes // bucket_nbytes)
    if count < 2:
        return [Bucket(0, nbytes)]
    words = gradient_nbytes // ALIGNMENT_BYTES
    ends = [words * i // count * ALIGNMENT_BYTES for i in range(count)] + [gradient_nbytes]
    buckets = [Bucket(ends[i], ends[i + 1]) for i in reversed(range(count))]
    return [*buckets, Bucket(gradient_nbytes, nbytes)] if nbytes > gradient_nbytes else buckets


class BucketSender:
    """Sender of the buckets of each gradient, each as soon as all its parameters have accumulated their gradients.

    Most parameters accumulate once in a backward pass. If one accumulates again after its bucket was sent (tied
    weights in reentrant checkpoints), the bucket is sent a second time at the end, and from then on only at the end.

    Args:
        buckets: buckets of the vector; one that also holds buffers holds no parameters, or is the only one.
        ranges: range of each parameter in the vector.
        send: function that packs and sends the bucket of a number.

    Attributes:
        sent: numbers of the buckets that have been sent.
    """

    def __init__(self, buckets: Sequence[Bucket], ranges: Sequence[Bucket], send: Callable[[int], None]) -> None:
        touched = [[n for n, bucket in enumerate(buckets) if bucket.intersection(each).nbytes > 0] for each in ranges]
        self._touched = touched  # buckets, by parameter
        self._members = [sum(number in each for each in touched) for number in range(len(buckets))]
        self._send = send
        self._late = set() if len(buckets) > 1 else {0}  # sent only at the end
        self.begin()

    def begin(self) -> None:
        """Start a new gradient."""
        self._missing = list(self._members)
        self._accumulated: set[int] = set()
        self._outdated: set[int] = set()
        self.sent: set[int] = set()

    def on_accumulated(self, parameter: int) -> None:
        """Record that a parameter has accumulated its gradient, and send each bucket that is now complete."""
        touched = self._touched[parameter]
        if parameter in self._accumulated:
            self._outdated |= self.sent.intersection(touched)
            self._late.update(touched)
            return
        self._accumulated.add(parameter)
        for number in touched:
            self._missing[number] -= 1
            if not self._missing[number] and number not in self._late:
                self._send(number)
                self.sent.add(number)

    def remaining(self) -> tuple[list[int], set[int]]:
        """Return the buckets that have not been sent, and those that must be sent a second time."""
        return [n for n in range(len(self._members)) if n not in self.sent], self._outdated
