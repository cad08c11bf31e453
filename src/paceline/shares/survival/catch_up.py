"""Place at which a rank that comes back takes part again."""

from __future__ import annotations

from math import ceil

from paceline.errors import RunError

LEAST_UNITS = 2
LEAD_S = 1.0
MOST_ATTEMPTS = 3


class CatchUp:
    """Account of a rank that comes back, and of the others, from which it knows where to wait for them.

    Its lead is as many units as the others pass in `LEAD_S`, and at least `LEAST_UNITS`, so that they know before they
    are there. Their pace is that since the first look, so the rank does not go ahead of them before it is known.

    A rank that begins from a checkpoint has units that the others had in their first updates, as the buckets that DDP
    builds anew. So its position is corrected by where the others were after the same batch.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # time of the first look, and the position of the others
        self._positions: dict[int, int] = {}  # of this rank, after each number of batches
        self._times_passed = 0

    def was_passed(self) -> None:
        """Begin anew: the others had passed the place at which this rank waited, before they knew of it.

        Raises:
            RunError: that has been so each time.
        """
        self._times_passed += 1
        if self._times_passed == MOST_ATTEMPTS:
            raise RunError(f"the others have passed the place at which this rank waited, {MOST_ATTEMPTS} times")
        self._first = None
        self._positions = {}

    def look(self, now_s: float, batches: int, position: int, others: tuple[int, int]) -> tuple[float | None, int]:
        """Return how long to wait before the next look (0 to take part now, None to go on), and the right position.

        Args:
            now_s: time in seconds.
            batches: number of batches that this rank has been handed out, counted as the others count.
            position: units that it has passed, as far as it knows.
            others: the same two of the others.

        >>> rank = CatchUp()
        >>> rank.look(10.0, 3, 7, others=(50, 52)), rank.look(10.4, 52, 56, others=(51, 53))
        ((None, 7), (None, 56))
        >>> rank.look(10.6, 53, 57, others=(52, 54))  # two units of its own first batches
        (None, 55)
        >>> rank.look(10.7, 54, 56, others=(52, 54)), rank.look(11.0, 54, 56, others=(54, 56))
        ((0.3, 56), (None, 56))
        >>> rank.look(11.2, 62, 64, others=(54, 56))
        (0.0, 64)
        """
        first_s, first = self._first = self._first or (now_s, others[1])
        self._positions[batches] = position
        if others[0] not in self._positions:
            return LEAD_S if others[0] < min(self._positions) else None, position
        correction = others[1] - self._positions[others[0]]
        self._positions = {number: each + correction for number, each in self._positions.items()}
        position += correction
        seen_s, lead = now_s - first_s, position - others[1]
        if seen_s < LEAD_S:
            return round(LEAD_S - seen_s, 3) if lead >= LEAST_UNITS else None, position
        return 0.0 if lead >= max(LEAST_UNITS, ceil((others[1] - first) / seen_s * LEAD_S)) else None, position
