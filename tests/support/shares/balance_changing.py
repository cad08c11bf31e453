"""Shares that follow a rule in place of the speeds."""

from paceline.shares import balancer, division


class ChangingShares:
    """Shares that change at each fifth update, by a fixed rule."""

    def __init__(self, ranks, sizes, equal=None):
        self._ranks, self._sizes = ranks, sizes
        self.shares = self.equal = equal or (sizes.batch_size,) * ranks
        self.changes = 0
        self.limits = None
        self._updates = 0

    @property
    def seconds(self):
        return [1 + self.changes % 3 * rank for rank in range(self._ranks)]

    def decide(self, samples, seconds):
        self._updates += 1
        if self._updates % 5 == 1:
            self.changes += 1
            pieces = min((1, 3, -2, 4, 0)[self.changes % 5], self._sizes.batch_size // self._sizes.size - 1)
            living = [rank for rank, share in enumerate(self.equal) if share]
            shares = list(self.equal)
            shares[living[0]] -= self._sizes.size * pieces
            shares[living[-1]] += self._sizes.size * pieces
            self.shares = tuple(shares)


def force_changes():
    """Let shares change by that rule, with an exchange of times at each update."""
    division.ShareBalancer, balancer.updates_at_once = ChangingShares, lambda seconds: 1
