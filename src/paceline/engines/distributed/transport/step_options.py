"""Options of the parameter groups for one step, which stay encoded until the number of groups is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta

from paceline.core.bounds import Option, Single
from paceline.engines.distributed.transport.encoded import decoded, encoded

MOST_OPTIONS = 64  # of a parameter group
Group = tuple[Single, Annotated[dict[str, Option], Meta(max_length=MOST_OPTIONS)]]


class StepOptions(NamedTuple):
    """Options of a step, as the loop of a user sets them.

    Attributes:
        learning_rates: learning rate of each parameter group; empty where the server sets them.
        others: other options of each parameter group, as the weight decay; empty for no change.
    """

    learning_rates: tuple[float, ...] = ()
    others: tuple[dict[str, Option], ...] = ()

    @classmethod
    @lru_cache(maxsize=64)  # they seldom change from step to step
    def decode(cls, content: bytes, groups: int) -> StepOptions:
        """Return the options that another process has sent.

        Args:
            content: encoded options, empty for none.
            groups: number of parameter groups of the optimizer.

        Raises:
            ValueError: they are none, or of another number of groups.

        >>> sent = StepOptions((0.1,), ({"momentum": 0.9},)).encode()
        >>> StepOptions.decode(sent, groups=1)
        StepOptions(learning_rates=(0.1,), others=({'momentum': 0.9},))
        """
        if not content:
            return cls()
        kind = Annotated[list[Group], Meta(min_length=groups, max_length=groups)]
        sent = decoded(content, kind, f"options of {groups} parameter groups")
        return cls(tuple(rate for rate, _ in sent), tuple(others for _, others in sent))

    def encode(self) -> bytes:
        """Return the options as bytes."""
        if not self.learning_rates:
            return b""
        others: Sequence[Mapping[str, Option]] = self.others or ({},) * len(self.learning_rates)
        return encoded(list(zip(self.learning_rates, others, strict=True)))
