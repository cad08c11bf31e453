"""Shares of the ranks in the global batch of an update: each by its speed, in whole pieces."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log, sqrt
from operator import attrgetter
from typing import Any, NamedTuple

from paceline.policies.estimators.speeds.restarting_median import JumpCounts, RestartingMedian
from paceline.policies.share_limits import ShareLimits, longest, of_few_sizes
from paceline.utils.state_dict import Stateful
from paceline.utils.validation import check_range

WINDOW = 15
LEAST_GAIN = 0.03
NOISE_FACTOR = 3.0  # a gain of that many standard errors is no chance
USED_MEMORY = 0.9  # of a device
SPREADS = 3.0  # of a time, kept back for the leases after the first one
LEAST_TIMES = 2  # of each rank before a decision, unless jumps last mostly


@dataclass(frozen=True)
class Pieces:
    """Sizes that a share may have.

    A share is B + j g samples with a whole j, where g = max(1, floor(B / m)), at least one piece and at most c B.

    Args:
        batch_size: B, samples of a rank under equal shares, >= 1.
        pieces: m, pieces of such a batch, >= 1.
        max_share: c, largest share as a multiple of B, >= 1.

    Example:
        >>> sizes = Pieces(batch_size=10, pieces=4, max_share=1.5)
        >>> sizes.size, sizes.fewest, sizes.most
        (2, 2, 14)
    """

    batch_size: int
    pieces: int = 8
    max_share: float = 1.5

    def __post_init__(self) -> None:
        check_range("[1, inf)", batch_size=self.batch_size, pieces=self.pieces)
        check_range("[1, inf)", max_share=self.max_share)

    @property
    def size(self) -> int:
        """Samples of a piece."""
        return max(1, self.batch_size // self.pieces)

    @property
    def fewest(self) -> int:
        """Smallest share, in samples."""
        return self.batch_size - (self.batch_size - 1) // self.size * self.size

    @property
    def most(self) -> int:
        """Largest share, in samples."""
        return self.batch_size + int((self.max_share - 1) * self.batch_size) // self.size * self.size

    def fitting(self, largest: int, peak_bytes: float, memory_bytes: float) -> int:
        """Return the largest share that a device is taken to have memory for.

        Memory grows at most in proportion to the samples, since a part of it is the model's. So with the peak p of s
        samples, s' samples fit if p s' / s is at most 0.9 of the memory. A share rises by one piece at a time, since a
        peak of more samples tells more. Equal shares are taken to fit.

        Args:
            largest: s, largest share so far, in samples.
            peak_bytes: p, largest memory in use so far, > 0.
            memory_bytes: memory that the rank may use.

        Example:
            >>> Pieces(16).fitting(16, peak_bytes=6.0, memory_bytes=10.0)
            18
            >>> Pieces(16).fitting(16, peak_bytes=9.5, memory_bytes=10.0)
            16
        """
        fits = largest * USED_MEMORY * memory_bytes / peak_bytes
        more = min(fits, max(largest, self.batch_size) + self.size, self.most) - self.batch_size
        return self.batch_size + max(0, int(more)) // self.size * self.size


def cost_of_lease(one: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Return the seconds that any lease costs, from two leases of a worker; None if both have as many samples.

    Leases of s and s' samples take t = c + s u and t' = c + s' u, so c = (t' s - t s') / (s - s').

    Args:
        one: samples, > 0, and seconds.
        other: those of another lease.

    Example:
        >>> cost_of_lease((4, 4.5), (1, 1.5))
        0.5
    """
    (samples, seconds), (others, others_s) = one, other
    if samples == others:
        return None
    return (others_s * samples - seconds * others) / (samples - others)


def even(samples: int, ranks: Sequence[bool]) -> tuple[int, ...]:
    """Return the shares of ranks that compute alike, some of which are lost.

    Args:
        samples: samples of the update.
        ranks: whether each rank lives.

    Example:
        >>> even(32, [True, True, False, True])
        (11, 11, 0, 10)
    """
    least, more = divmod(samples, sum(ranks))
    places = accumulate(ranks, initial=0)
    return tuple(least + (place < more) if lives else 0 for place, lives in zip(places, ranks, strict=False))


def deal(
    seconds: Sequence[float], sizes: Pieces, most: Sequence[int] | None = None, equal: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the shares that end an update first.

    Each rank begins with the smallest share; each further piece goes to the rank that would end first with it, and of
    equal ones to that with the smallest share. That is optimal, since the ends grow with the shares.

    Args:
        seconds: seconds per sample of each rank, > 0.
        sizes: sizes that a share may have.
        most: largest share of each rank, at least its equal one; None for the largest size or that.
        equal: equal shares of the ranks, from which theirs differ by whole pieces: 0 for a lost rank; None for B each.

    Returns:
        Samples of each rank; their sum is that of equal shares.

    Example:
        >>> deal([0.1, 0.1, 0.1, 0.2], Pieces(16))
        (18, 18, 18, 10)
        >>> deal([0.1, 0.1, 0.0, 0.2], Pieces(16, max_share=2.0), equal=even(64, [True, True, False, True]))
        (26, 25, 0, 13)

    Source: greedy list scheduling (Graham, 1966) of equal pieces on ranks of different speeds.
    """
    size, ranks = sizes.size, range(len(seconds))
    equal = equal or [sizes.batch_size for _ in ranks]
    limits = [max(most[rank] if most else sizes.most, equal[rank]) if equal[rank] else 0 for rank in ranks]
    shares = [(each - 1) % size + 1 if each else 0 for each in equal]
    pieces = (sum(equal) - sum(shares)) // size
    waiting = [(seconds[rank] * (shares[rank] + size), shares[rank], rank) for rank in ranks]
    waiting = [each for each in waiting if each[1] + size <= limits[each[2]]]
    heapq.heapify(waiting)
    for _ in range(pieces):
        _, share, rank = heapq.heappop(waiting)
        shares[rank] = share = share + size
        if share + size <= limits[rank]:
            heapq.heappush(waiting, (seconds[rank] * (share + size), share, rank))
    return tuple(shares)


class LeaseSizes(NamedTuple):
    """Sizes of the leases of an update whose samples are a queue.

    Attributes:
        firsts: samples of the first lease of each worker.
        later: samples of each lease after it.
    """

    firsts: tuple[int, ...]
    later: int


def cut_in_leases(
    shares: Sequence[int], sizes: Pieces, spread: float, seconds: Sequence[float], lease_s: float = 0.0
) -> LeaseSizes:
    """Return the sizes of leases where a part of an update is dealt as workers ask for more.

    A worker ends its share s early or late by the time of some sigma s samples. So its first lease leaves three times
    as many of them, in whole pieces; a half at most, and where the noise is not known yet, as in factoring.

    With later leases of k pieces of u seconds the update ends about k u / 2 late, and a worker that leaves R pieces
    pays the cost c of R / k leases. The sum is least for k = sqrt(2 R c / u), with the largest R and the smallest u.

    Leases are whole shares where later ones gain nothing: of n workers that take T s for their shares, the last one is
    late by about T sigma sqrt(2 log n).

    Args:
        shares: samples of each worker by its speed, >= 1.
        sizes: sizes of the pieces.
        spread: sigma, standard deviation of the logarithm of a time; inf while it is unknown.
        seconds: seconds per sample of each worker; nan for one whose speed is unknown.
        lease_s: c, cost of a lease in seconds, whatever its samples, >= 0.

    Example:
        >>> cut_in_leases([16, 16, 8], Pieces(16), spread=0.1, seconds=[0.1, 0.1, 0.2])
        LeaseSizes(firsts=(12, 12, 6), later=2)
        >>> cut_in_leases([16, 16, 8], Pieces(16), spread=0.2, seconds=[0.1, 0.1, 0.2], lease_s=0.1)
        LeaseSizes(firsts=(8, 8, 4), later=4)
        >>> cut_in_leases([16, 16, 8], Pieces(16), spread=0.1, seconds=[0.1, 0.1, 0.2], lease_s=0.2)
        LeaseSizes(firsts=(16, 16, 8), later=4)

    Source: Hummel, Schonberg and Flynn, "Factoring", 1992; the largest of n normal numbers; k as in Kruskal and Weiss,
    "Allocating independent subtasks on parallel processors", 1985, of a noise that does not depend on k here.
    """
    piece = sizes.size
    kept_back = min(SPREADS * spread, 0.5)
    left = [min(round(kept_back * share / piece), (share - 1) // piece) for share in shares]
    known = [(share, each) for share, each in zip(shares, seconds, strict=True) if each > 0]
    most, piece_s = max(left, default=0), piece * min((each for _, each in known), default=inf)
    later = max(1, min(most, sizes.most // piece, round(sqrt(2 * most * lease_s / piece_s))))
    if spread < inf:
        whole_s = max((share * each for share, each in known), default=0.0)
        late_s = whole_s * spread * sqrt(2 * log(len(shares)))
        if late_s <= (later * piece_s / 2 if known else 0.0) + lease_s * most / later:
            return LeaseSizes(tuple(shares), later * piece)
    return LeaseSizes(tuple(share - each * piece for share, each in zip(shares, left, strict=True)), later * piece)


class ShareDecision(NamedTuple):
    """Shares from an update on, and the reason.

    Attributes:
        shares: samples of each rank.
        reason: text for the log.
    """

    shares: tuple[int, ...]
    reason: str


class ShareBalancer(Stateful):
    """Policy of the shares: they follow the speeds, and change only for a gain above the noise.

    With the median c_i of the seconds per sample of rank i, an update with shares s_i takes max_i s_i c_i. New shares
    are taken if the present ones take longer by more than max(a, z e), where e is the standard error of the medians:
    e = 1.25 sigma / sqrt(N), sigma the standard deviation of log(c) of all ranks around their own medians, and N the
    fewest times of a rank. Equal shares are taken again as soon as they would not be slower than unequal ones, whatever
    the noise: after times that were slow by chance, unequal shares would stay for long.

    Args:
        ranks: number of ranks n, >= 1.
        sizes: sizes that a share may have.
        equal: equal shares of the ranks: 0 for a lost one, whose samples the others have; None for B each.
        least_gain: a, smallest gain of new shares, >= 0.

    Attributes:
        equal: equal shares of the ranks.
        shares: samples of each rank, as decided last.
        limits: limits of the next decision.
        known: latest seconds per sample of each rank.

    Source: the prediction of a share from recent speeds is that of LB-BSP (Chen et al., SoCC 2020).
    """

    _saved = ("shares",)

    def __init__(
        self, ranks: int, sizes: Pieces, equal: tuple[int, ...] | None = None, least_gain: float = LEAST_GAIN
    ) -> None:
        check_range("[1, inf)", ranks=ranks)
        self._least_gain = least_gain
        self._sizes = sizes
        self._jumps = JumpCounts()
        self.known = [RestartingMedian(WINDOW, self._jumps) for _ in range(ranks)]
        self.shares = self.equal = equal or (sizes.batch_size,) * ranks
        self.limits = ShareLimits((sizes.most,) * ranks)
        self._used = [self.shares]  # while a compiler takes few sizes

    @property
    def seconds(self) -> list[float]:
        """Seconds per sample of each rank that the present shares follow; 1 for each while they are equal."""
        is_equal = self.shares == self.equal
        return [1.0 if is_equal else known.median for known in self.known]

    def for_ranks(self, ranks: Sequence[int | None], equal: tuple[int, ...] | None = None) -> ShareBalancer:
        """Return the policy of other ranks, with what is known of those that stay.

        Args:
            ranks: number that each of the other ranks has here; None for a new one.
            equal: equal shares of the other ranks; None for B each.
        """
        other = ShareBalancer(len(ranks), self._sizes, equal, self._least_gain)
        other._jumps = self._jumps
        other.known = [RestartingMedian(WINDOW, self._jumps) if i is None else self.known[i] for i in ranks]
        return other

    def add(self, samples: Sequence[float], seconds: Sequence[float]) -> None:
        """Add the times of an update.

        Args:
            samples: samples of each rank in the update, or their cost, >= 0.
            seconds: seconds of each rank for them, without waiting for other ranks; 0 for a time that does not count.
        """
        for known, count, taken in zip(self.known, samples, seconds, strict=True):
            if count and taken > 0:
                known.add(taken / count)

    def decide(self, samples: Sequence[float], seconds: Sequence[float]) -> ShareDecision | None:
        """Add the times of an update, and return new shares; None to keep the present ones."""
        self.add(samples, seconds)
        living = [known for known, share in zip(self.known, self.equal, strict=True) if share]
        fewest = min(len(known.values) for known in living)
        if fewest < (1 if self._jumps.last_mostly else LEAST_TIMES):
            return None
        costs = [known.median if share else 0.0 for known, share in zip(self.known, self.equal, strict=True)]
        before_s = longest(self.shares, costs)
        most = [max(limit, share) for limit, share in zip(self.limits.most, self.equal, strict=True)]
        is_over = any(share > limit for share, limit in zip(self.shares, most, strict=True))
        for new in (self._best(costs, most), self.equal):
            after_s = longest(new, costs)
            gain = before_s / after_s - 1
            is_better = gain >= 0 if new == self.equal else self._is_above_noise(gain, fewest)
            if new != self.shares and (is_better or is_over):
                self.shares = new
                if self.limits.is_compiled and new not in self._used:
                    self._used.append(new)
                return ShareDecision(
                    new, f"an update takes {after_s:.3g} s, and {before_s:.3g} s with the shares before"
                )
        return None

    def _best(self, costs: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
        new = deal(costs, self._sizes, most, self.equal)
        return of_few_sizes(new, self._used, costs, most) if self.limits.is_compiled else new

    def _is_above_noise(self, gain: float, times: int) -> bool:
        return gain > self._least_gain and gain > NOISE_FACTOR * 1.25 * self.spread() / sqrt(times)

    def state_dict(self) -> dict[str, Any]:
        """Return the shares, what they are decided by, and the known seconds per sample."""
        known = [each.state_dict() for each in self.known]
        return {
            **super().state_dict(),
            "used": list(self._used),
            "sizes": vars(self._sizes),
            "equal": self.equal,
            "least_gain": self._least_gain,
            "jumps": self._jumps.state_dict(),
            "known": known,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of as many ranks and the same sizes."""
        super().load_state_dict(state)
        self._jumps.load_state_dict(state["jumps"])
        self._used = [tuple(each) for each in state["used"]]
        for each, saved in zip(self.known, state["known"], strict=True):
            each.load_state_dict(saved)

    def spread(self) -> float:
        """Return sigma, with one degree of freedom less for each rank; inf while it is unknown."""
        squares, count = 0.0, 0
        for known in filter(attrgetter("values"), self.known):
            middle = known.median
            squares += sum(log(value / middle) ** 2 for value in known.values)
            count += len(known.values) - 1
        return sqrt(squares / count) if count else inf
