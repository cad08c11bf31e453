"""Weighing of backward passes: by samples, by tokens, or not at all."""

from __future__ import annotations

import torch

from paceline.errors import UsageError
from paceline.shares.loss import WEIGHINGS, read_loss
from paceline.shares.rank_times import RankTimes
from paceline.shares.texts import refusal_of_loss, refusal_of_tokens

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
    """

    def __init__(self, given: str, ranks: RankTimes, *, is_read_always: bool) -> None:
        self._given = given
        self._ranks = ranks
        self._is_read_always = is_read_always
        self._kind = ""
        self._passes = 0

    def begin(self, loss: torch.Tensor, samples: int) -> str:
        """Return what passes are weighed by, the same on all ranks.

        Raises:
            UsageError: the graph of the loss does not show it.
        """
        reading = read_loss(loss, samples)
        found = reading.weighing if self._given == "auto" else self._given
        kinds = {row[0] for row in self._ranks.gather([float(WEIGHINGS.index(found)) if found else -1.0])}
        names = {WEIGHINGS[int(kind)] for kind in kinds if kind >= 0}
        if -1.0 in kinds or not (len(names) == 1 or names == {"samples", "tokens"}):
            raise UsageError(refusal_of_loss(reading))
        self._kind = "tokens" if "tokens" in names else names.pop()
        return self._kind

    def weight_of(self, loss: torch.Tensor, samples: int, equal: int) -> float:
        """Return the factor of a pass.

        Args:
            loss: root of the pass.
            samples: samples of this rank's batch.
            equal: samples of a rank's batch with equal shares.

        Raises:
            UsageError: the loss is not what it was at first.
        """
        if self._kind == "none":
            return 1.0
        self._passes += 1
        if self._kind == "tokens":
            tokens = read_loss(loss, samples).divisor
            if tokens is None:
                raise UsageError(refusal_of_loss(read_loss(loss, samples)))
            return tokens * self._ranks.count / self._ranks.sum(tokens)
        if self._given == "auto" and self._is_due():
            reading = read_loss(loss, samples)
            if reading.weighing == "tokens":
                raise UsageError(refusal_of_tokens(reading))
        return samples / equal

    def _is_due(self) -> bool:
        return self._is_read_always or self._passes <= READ_ALWAYS or self._passes % READ_EVERY == 0
