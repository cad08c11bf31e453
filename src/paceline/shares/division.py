"""Division of the samples of each update among the ranks, by the shares that were decided last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from paceline.errors import UsageError
from paceline.policies.shares import Pieces, ShareBalancer, even
from paceline.shares.batches import Dealt, cut, cut_for, divided, piece
from paceline.shares.costs import CostOf, deal_by_cost, equal_by_cost, pads, work_of
from paceline.shares.handed_out import Loader
from paceline.shares.rank_batches import Batch
from paceline.shares.survival.surviving_training import SurvivingTraining
from paceline.shares.texts import refusal_of_sizes


class Division:
    """Division of updates, the same on all ranks.

    Args:
        sizes: sizes that a share may have.
        ranks: number of ranks.
        rank: number of this rank.
        find_cost: function that returns the cost of the samples of a loader; None where it is not known.
        survival: survival of this rank, where others may be lost; None where they may not.

    Attributes:
        policy: policy of the shares.
        most_work: limits of the ranks, where samples are dealt by cost; None until they are known.
    """

    def __init__(
        self,
        sizes: Pieces,
        ranks: int,
        rank: int,
        find_cost: Callable[[Loader], CostOf | None],
        survival: SurvivingTraining | None,
    ) -> None:
        self.sizes = sizes
        self._ranks = ranks
        self._rank = rank
        self._find_cost = find_cost
        self._survival = survival
        self._costs: WeakKeyDictionary[Loader, CostOf | None] = WeakKeyDictionary()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with equal shares of the ranks that live."""
        batch_size = self.sizes.batch_size
        self.policy = ShareBalancer(self._ranks, self.sizes, self._even(self._ranks * batch_size))
        self.most_work: list[float] | None = None
        self._used_counts = [(batch_size,) * self._ranks]  # samples of the ranks, while a compiler takes few sizes

    def cost_of(self, loader: Loader) -> CostOf | None:
        """Return the cost of a loader's samples; None where it is not known."""
        if loader not in self._costs:
            self._costs[loader] = self._find_cost(loader)
        return self._costs[loader]

    def divide(self, loader: Loader, batches: Sequence[Batch], size: int | None) -> tuple[Batch, Dealt]:
        """Return this rank's batch of an update that a loader asks for now, and how the update is divided.

        Args:
            loader: loader that asks.
            batches: batch of each rank with equal shares.
            size: batch size of the loader, if it is one of those that train; else None.
        """
        is_whole = {len(batch) for batch in batches} == {size}
        if self._survival is not None and size is not None and len(self._survival.living) < self._ranks:
            if self._survival.is_alone:
                return piece(batches, self._rank, max(2, self.sizes.size))  # batch normalization refuses one
            return self._divide_among_living(loader, batches, is_whole=is_whole)
        if size is None or not is_whole:
            return own_batch(batches, self._rank)
        if (cost_of := self.cost_of(loader)) is not None:
            return self._divide_by_cost(loader, batches, cost_of)
        shares = self.scaled(size)
        return cut(batches, shares, self._rank), divided(shares, size)

    def scaled(self, size: int) -> Sequence[int]:
        """Return the shares of batches of a size, which are in proportion to those of the first loader.

        Raises:
            UsageError: they are no whole numbers.
        """
        batch_size, shares = self.sizes.batch_size, self.policy.shares
        if len(set(shares)) == 1:
            return [size] * self._ranks
        if any(share * size % batch_size for share in shares):
            raise UsageError(refusal_of_sizes(batch_size, size))
        return [share * size // batch_size for share in shares]

    def _divide_among_living(self, loader: Loader, batches: Sequence[Batch], *, is_whole: bool) -> tuple[Batch, Dealt]:
        """Divide an update by speed; evenly, if it has costs or another number of samples than the policy's."""
        shares = equal = self._even(sum(map(len, batches)))
        cost_of = self.cost_of(loader)
        if is_whole and sum(equal) == sum(self.policy.equal) and cost_of is None:
            shares = self.policy.shares
        own, dealt = cut_for(batches, shares, equal, self._rank)
        if cost_of is not None:
            work = work_of(batches, shares, cost_of, is_padded=pads(loader.collate_fn))
            dealt = dealt._replace(work=work, equal_work=work)
        return own, dealt

    def _divide_by_cost(self, loader: Loader, batches: Sequence[Batch], cost_of: CostOf) -> tuple[Batch, Dealt]:
        is_padded = pads(loader.collate_fn)
        if self.most_work is None:
            return batches[self._rank], equal_by_cost(batches, cost_of, is_padded=is_padded)
        return deal_by_cost(
            batches,
            rank=self._rank,
            cost_of=cost_of,
            seconds=self.policy.seconds,
            limits=self.most_work,
            max_share=self.sizes.max_share,
            used=self._used_counts if self.policy.limits.is_compiled else None,
            is_padded=is_padded,
        )

    def _even(self, samples: int) -> tuple[int, ...]:
        """Return the equal shares of an update, none for a lost rank."""
        living = self._survival.living if self._survival is not None else range(self._ranks)
        return even(samples, [rank in living for rank in range(self._ranks)])


def own_batch(batches: Sequence[Batch], rank: int) -> tuple[Batch, Dealt]:
    """Return the batch that a rank has with equal shares, and that division."""
    counts = [len(batch) for batch in batches]
    return batches[rank], divided(counts, counts[0] if len(set(counts)) == 1 else 0)
