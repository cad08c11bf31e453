"""Shares that follow a rule in place of the speeds."""


class ChangingShares:
    """Shares that change at each fifth update, by a fixed rule."""

    def __init__(self, ranks, sizes):
        self._ranks, self._sizes = ranks, sizes
        self.shares = (sizes.batch_size,) * ranks
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
            moved = self._sizes.size * pieces
            rest = [self._sizes.batch_size] * (self._ranks - 2)
            self.shares = (self._sizes.batch_size - moved, *rest, self._sizes.batch_size + moved)


def force_changes(balancer):
    """Let the module of the balancer change shares by that rule, with an exchange of times at each update."""
    balancer.ShareBalancer, balancer.updates_at_once = ChangingShares, lambda seconds: 1
