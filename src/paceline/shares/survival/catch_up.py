"""Place at which a rank that comes back takes part again."""

from __future__ import annotations

from math import ceil

LEAST_UNITS = 2
LEAD_S = 1.0


class CatchUp:
    """Lead of a rank that comes back, by which the others know where it waits before they are there.

    It is as many units as the others pass in `LEAD_S`, and at least `LEAST_UNITS`. Their pace is that since the first
    look at them, so the rank does not go ahead of them before it has seen them for so long.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None  # time of the first look, and where the others were

    def wait_s(self, now_s: float, position: int, others: int) -> float | None:
        """Return how long to wait before the next look; 0 to take part now, None to go on.

        Args:
            now_s: time in seconds.
            position: units that this rank has passed.
            others: units that the others have passed.

        >>> rank = CatchUp()
        >>> rank.wait_s(10.0, 3, others=50), rank.wait_s(10.2, 52, others=51), rank.wait_s(10.4, 54, others=52)
        (None, None, 0.6)
        >>> rank.wait_s(11.0, 54, others=55), rank.wait_s(11.2, 62, others=56)
        (None, 0.0)
        """
        first_s, first = self._first = self._first or (now_s, others)
        seen_s, lead = now_s - first_s, position - others
        if seen_s < LEAD_S:
            return round(LEAD_S - seen_s, 3) if lead >= LEAST_UNITS else None
        return 0.0 if lead >= max(LEAST_UNITS, ceil((others - first) / seen_s * LEAD_S)) else None
