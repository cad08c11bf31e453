"""Pieces of what travels, so that a gradient begins to leave before its last layer has been reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.server.flat_buffers import ALIGNMENT_BYTES

PIECE_BYTES = 1 << 21
MOST = 48  # pieces: a set of them is a whole number that float64 holds


class Bucket(NamedTuple):
    """A contiguous range of the bytes that travel.

    Attributes:
        start: first byte.
        stop: the one after the last.

    >>> Bucket(0, 100).common(Bucket(64, 128))
    Bucket(start=64, stop=100)
    """

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many; none or fewer where two pieces have nothing in common."""
        return self.stop - self.start

    def common(self, other: Bucket) -> Bucket:
        """Return what two pieces have in common."""
        return Bucket(max(self.start, other.start), min(self.stop, other.stop))

    def of(self, memory: Tensor) -> Tensor:
        """Return these bytes of everything that travels, uint8 [nbytes]."""
        return memory[self.start : self.stop]


def cut(gradient_nbytes: int, nbytes: int, piece_nbytes: int = PIECE_BYTES) -> list[Bucket]:
    """Return the pieces of a vector in the order in which a backward pass finishes them: from its end.

    Less than two pieces' worth goes as one. Otherwise the changes of the buffers, known last, are a piece of their own.

    Args:
        gradient_nbytes: of the gradient, where the buffers begin; a multiple of 64.
        nbytes: of everything that travels.
        piece_nbytes: of a piece, about; more if there would be too many.

    >>> cut(256, 300, piece_nbytes=100)
    [Bucket(start=128, stop=256), Bucket(start=0, stop=128), Bucket(start=256, stop=300)]
    """
    count = min(MOST - 1, gradient_nbytes // piece_nbytes)
    if count < 2:
        return [Bucket(0, nbytes)]
    words = gradient_nbytes // ALIGNMENT_BYTES
    ends = [words * i // count * ALIGNMENT_BYTES for i in range(count)] + [gradient_nbytes]
    pieces = [Bucket(ends[i], ends[i + 1]) for i in reversed(range(count))]
    return [*pieces, Bucket(gradient_nbytes, nbytes)] if nbytes > gradient_nbytes else pieces


def as_number(pieces: set[int]) -> int:
    """Return a set of pieces as a number with a bit for each.

    >>> as_number({0, 3}), list(from_number(9))
    (9, [0, 3])
    """
    return sum(1 << each for each in pieces)


def from_number(number: int) -> Iterator[int]:
    """Yield the pieces of a set."""
    return (each for each in range(number.bit_length()) if number >> each & 1)


class BucketSender:
    """Sends the pieces of each gradient as soon as all parameters in them have been accumulated.

    Most are accumulated once in a backward pass. Where one is accumulated again after its piece has gone (tied weights
    in reentrant checkpoints), the piece goes a second time at the end, and from then on only at the end.

    Args:
        pieces: of what travels; one with something else than parameters in it holds none of them, or is the only one.
        places: of each parameter in what travels.
        send: packs and sends a piece, given its number.

    Attributes:
        gone: the pieces that have been sent.
    """

    def __init__(self, pieces: Sequence[Bucket], places: Sequence[Bucket], send: Callable[[int], None]) -> None:
        touched = [[n for n, piece in enumerate(pieces) if piece.common(place).nbytes > 0] for place in places]
        self._touched = touched  # pieces, by parameter
        self._members = [sum(number in each for each in touched) for number in range(len(pieces))]
        self._send = send
        self._late = set() if len(pieces) > 1 else {0}  # only at the end
        self.begin()

    def begin(self) -> None:
        """Get ready for another gradient."""
        self._missing = list(self._members)
        self._accumulated: set[int] = set()
        self._spoilt: set[int] = set()
        self.gone: set[int] = set()

    def accumulated(self, parameter: int) -> None:
        """Take note of a parameter, and send every piece that is complete with it."""
        touched = self._touched[parameter]
        if parameter in self._accumulated:
            self._spoilt |= self.gone.intersection(touched)
            self._late.update(touched)
            return
        self._accumulated.add(parameter)
        for number in touched:
            self._missing[number] -= 1
            if not self._missing[number] and number not in self._late:
                self._send(number)
                self.gone.add(number)

    def rest(self) -> tuple[list[int], set[int]]:
        """Return the pieces that are still to be sent, and those that are to be sent a second time."""
        return [n for n in range(len(self._members)) if n not in self.gone], self._spoilt
