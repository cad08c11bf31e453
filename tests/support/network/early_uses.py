"""Early sums as a test sees them: small buckets, a group without other ranks, and which sums are used."""

from functools import partial

from paceline.engines.distributed.announced_sums import early_sum
from paceline.engines.distributed.announced_sums.early_sum import EarlySum, make_buckets
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.transport.connection import ConnectionLost


class NotedGroup:
    """Group that notes the sums that begin, and adds nothing."""

    def __init__(self, rank=0, size=2, fails=False):
        self.rank, self.size, self.fails = rank, size, fails
        self.begun = []

    def begin_early(self, vector):
        if self.fails:
            raise ConnectionLost("gone")
        self.begun.append(vector)
        return []

    def wait(self, pending):
        assert pending == []


def make_small(monkeypatch):
    """Let each parameter be a bucket."""
    monkeypatch.setattr(early_sum, "make_buckets", partial(make_buckets, nbytes=1))


def note_uses(monkeypatch):
    """Return a list to which the number of buckets in the backward pass is added for each early sum that is used."""
    begun, uses, end, wait = {}, [], EarlySum.end, RankParameters.await_early

    def ending(early):
        if early._is_open:
            begun[id(early)] = early._next
        return end(early)

    def waiting(parameters):
        wait(parameters)
        uses.append(begun[id(parameters._early)])

    monkeypatch.setattr(EarlySum, "end", ending)
    monkeypatch.setattr(RankParameters, "await_early", waiting)
    return uses
