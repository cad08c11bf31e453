"""Weighing of backward passes: by samples, by tokens, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan

import torch

from paceline.errors import UsageError
from paceline.jobs.loss_graph import READINGS, read_loss
from paceline.shares.rank_times import RankTimes
from paceline.shares.texts import (
    refusal_of_divisors,
    refusal_of_loss,
    refusal_of_mean,
    refusal_of_pairs,
    refusal_of_sum,
    refusal_of_tokens,
)

READ_ALWAYS, READ_EVERY = 10, 100  # passes; reading a loss waits for its device


class Weighing:
    """Factors of the backward passes of one rank, so that the mean of the ranks is that of their samples.

    With s_i samples of rank i, B with equal shares, and n ranks, the reducer forms the mean of the ranks' gradients.
    A mean over samples is weighed by s_i / B. A mean over t_i tokens is weighed by n t_i / (t_1 + ... + t_n), which
    makes it the mean over all tokens. A sum has the weight 1.

    Args:
        given: "samples", "tokens" or "none"; "auto" to read the graph of the first loss.
        ranks: exchange with the other ranks.
        is_read_always: whether reading a loss waits for nothing.

    Attributes:
        divisor: number by which the latest loss was divided; nan if it was not read.
    """

    def __init__(self, given: str, ranks: RankTimes, *, is_read_always: bool) -> None:
        self._given = given
        self._ranks = ranks
        self._is_read_always = is_read_always
        self._kind = ""
        self._passes = 0
        self._square = 0  # samples of the first loss, if it had as many columns
        self._read_samples: set[int] = set()  # of passes whose loss was read
        self.divisor = nan

    def begin(self, loss: torch.Tensor, samples: int) -> str:
        """Return what passes are weighed by, the same on all ranks.

        Raises:
            UsageError: the graph of the loss does not show it.
        """
        reading = read_loss(loss, samples)
        self._square = samples if reading.is_square else 0
        found = reading.weighing if self._given == "auto" else self._given
        rows = self._ranks.gather([float(READINGS.index(found)) if found else nan, _number(reading.divisor)])
        names = {READINGS[int(row[0])] for row in rows if not isnan(row[0])}
        if any(isnan(row[0]) for row in rows) or names > {"none"}:
            raise UsageError(refusal_of_loss(reading))
        if names == {"divided"} and len({row[1] for row in rows}) == 1:
            self._kind = "none"
        else:
            self._kind = names.pop() if names in ({"samples"}, {"none"}) else "tokens"
        return self._kind

    def check(self, divisors: Sequence[float]) -> None:
        """Check that a sum is divided by the same number on all ranks, if that is why it is not weighed.

        Args:
            divisors: divisor of each rank in an update; nan where it was not read.

        Raises:
            UsageError: they differ.
        """
        known = {each for each in divisors if not isnan(each)}
        if self._kind == "none" and self._given == "auto" and len(known) > 1:
            raise UsageError(refusal_of_divisors(sorted(known)))

    def weight_of(self, loss: torch.Tensor, samples: int, weight: float) -> float:
        """Return the factor of a pass.

        Args:
            loss: root of the pass.
            samples: samples of this rank's batch.
            weight: what the mean over these samples counts in the mean of the ranks.

        Raises:
            UsageError: the loss is not what it was at first.
        """
        self._passes += 1
        self.divisor = nan
        if self._kind == "tokens":
            tokens = read_loss(loss, samples).divisor
            if tokens is None:
                raise UsageError(refusal_of_loss(read_loss(loss, samples)))
            return tokens * self._ranks.count / self._ranks.sum(tokens)
        if self._given == "auto" and self._is_due(samples):
            self._read_samples.add(samples)
            reading = read_loss(loss, samples)
            if reading.is_square and self._square not in (0, samples):
                raise UsageError(refusal_of_pairs(reading))
            self.divisor = _number(reading.divisor)
            if self._kind == "samples" and reading.weighing != "samples":
                raise UsageError(refusal_of_sum(reading) if reading.is_sum else refusal_of_tokens(reading))
            if self._kind == "none" and not reading.is_sum:
                raise UsageError(refusal_of_mean(reading) if reading.weighing else refusal_of_loss(reading))
        return weight if self._kind == "samples" else 1.0

    def _is_due(self, samples: int) -> bool:
        is_new = samples not in self._read_samples
        return self._is_read_always or is_new or self._passes <= READ_ALWAYS or self._passes % READ_EVERY == 0


def _number(value: float | None) -> float:
    return nan if value is None else value
