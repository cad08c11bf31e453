"""Sets of small whole numbers as bits: they travel, and are looked up, without an object for each number."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import reduce
from operator import and_


class IndexBits:
    r"""Set of small whole numbers.

    Args:
        content: bit i % 8 of byte i // 8 says whether the set has the number i; those beyond it are not in the set.

    Attributes:
        content: as given.

    >>> bits = IndexBits.of({0, 9})
    >>> bits.content, [number in bits for number in (0, 1, 9, 500)]
    (b'\x01\x02', [True, False, True, False])
    """

    def __init__(self, content: bytes) -> None:
        self.content = content

    @classmethod
    def of(cls, numbers: Collection[int]) -> IndexBits:
        """Return the set of these numbers, each >= 0."""
        content = bytearray(max(numbers, default=-1) // 8 + 1)
        for number in numbers:
            content[number // 8] |= 1 << number % 8
        return cls(bytes(content))

    @classmethod
    def in_all(cls, sets: Iterable[bytes]) -> IndexBits:
        r"""Return the numbers that are in all sets, given their contents; none without a set.

        >>> IndexBits.in_all([IndexBits.of({1, 2}).content, IndexBits.of({2, 70}).content]).content
        b'\x04'
        """
        return cls(bytes(reduce(and_, column) for column in zip(*sets, strict=False)))

    def __contains__(self, number: object) -> bool:
        """Return whether the set has a number."""
        assert isinstance(number, int)
        byte = number // 8
        return byte < len(self.content) and bool(self.content[byte] >> number % 8 & 1)
