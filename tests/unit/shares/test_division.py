"""Division of updates while a rank is lost: no sample is left out, whatever the loader."""

from itertools import chain
from types import SimpleNamespace

import pytest
from torch.utils.data import default_collate

from paceline.policies.shares import Pieces
from paceline.shares.division import Division

RANKS, LOST = 4, 2
SLOW_FIRST = (3.0, 1.0, 0.0, 1.0)


class Loader:
    collate_fn = staticmethod(default_collate)


def divisions(cost=None):
    """Return the division of each rank that lives, once it has followed their speeds."""
    survival = SimpleNamespace(living=tuple(rank for rank in range(RANKS) if rank != LOST), is_alone=False)
    found = [
        Division(Pieces(16, max_share=2.0), RANKS, rank, lambda loader: cost, survival) for rank in survival.living
    ]
    for each in found:
        for _ in range(3):
            shares = each.policy.shares
            each.policy.decide(shares, [share * s for share, s in zip(shares, SLOW_FIRST, strict=True)])
    return found


def divided(size, count, cost=None):
    """Return the batches of the ranks that live, and their division."""
    batches = [[(rank, each) for each in range(count)] for rank in range(RANKS)]
    results = [each.divide(Loader(), batches, size) for each in divisions(cost)]
    assert sorted(sample for own, _ in results for sample in own) == sorted(chain(*batches))
    return results


def test_shares_follow_the_speeds_of_the_ranks_that_live():
    assert [len(own) for own, _ in divided(16, 16)] == [8, 29, 27]


@pytest.mark.parametrize(("size", "count"), [(8, 8), (32, 32), (16, 5), (32, 16)])
def test_batches_of_another_size_are_divided_evenly(size, count):
    counts = [len(own) for own, _ in divided(size, count)]
    assert max(counts) - min(counts) <= 1


def test_samples_with_costs_are_divided_evenly_and_their_work_is_their_cost():
    (own, dealt), *_ = divided(16, 16, cost=lambda sample: 1.0 + sample[1])
    assert (dealt.samples, dealt.work) == ((22, 21, 0, 21), dealt.equal_work)
    assert dealt.work[0] == sum(1.0 + sample[1] for sample in own)
    assert dealt.work[LOST] == 0
