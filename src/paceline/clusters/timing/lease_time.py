"""Time of a lease: the seconds that a part of a minibatch takes."""

from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.validation import check_range


@checked_dataclass(frozen=True, kw_only=True)
class LeaseTime:
    """Time of a lease, a part of a minibatch that a worker computes at once, as under ``balanced(m=8)``.

    ``seconds = c + (x - c) * share,  c = min(cost_s, x)``

    where x is the time of a whole minibatch. So ``balanced`` pays ``cost_s`` for each lease, and a whole minibatch
    takes x, as recorded.

    Args:
        cost_s: seconds of a lease that do not depend on the number of its samples, >= 0.
        is_independent: whether each lease has a time x of its own; else all leases of a worker in an update have one,
            so that a worker is slow or fast for a whole update.

    >>> LeaseTime(cost_s=0.5).seconds(work_s=1.0, share=0.25)
    0.625
    """

    cost_s: float = 0.0
    is_independent: bool = False

    def __post_init__(self) -> None:
        check_range("[0, inf)", cost_s=self.cost_s)

    def seconds(self, work_s: float, share: float) -> float:
        """Return the seconds of a lease.

        Args:
            work_s: x, seconds of a whole minibatch, >= 0.
            share: samples of the lease over those of a whole minibatch, > 0.
        """
        if share == 1.0:
            return work_s
        fixed_s = min(self.cost_s, work_s)
        return fixed_s + (work_s - fixed_s) * share
