"""What workers without a server tell each other of an iteration, besides the vectors that they sum: a few numbers."""

from __future__ import annotations

from math import nan
from typing import Any, NamedTuple


class StepReport(NamedTuple):
    """What a worker tells of its part in an iteration.

    Attributes:
        generation: of those who take part, counted from 1.
        draw: which work it has done; 0 if it had none.
        loss: and what comes after it, as in `Arrival`.
        factor: of the correction, nan for none.
        compute_s: of the gradient and what is done to vectors.
        waited_s: for the sum before, after it had its own gradient.
        leaves: why it wants the run to end, empty if it does not.
    """

    generation: int = 0
    draw: int = 0
    loss: float = nan
    samples: int = 0
    squared_norm: float = nan
    variance: float = nan
    finite: bool = False
    factor: float = nan
    compute_s: float = 0.0
    waited_s: float = 0.0
    leaves: str = ""


class StepSummary(NamedTuple):
    """What all workers have told of an iteration.

    Attributes:
        generation: of those who take part.
        now: seconds since the run began, at rank 0, when the last one had told.
        reforms: whether others take part after this iteration.
        hands: by worker.
    """

    generation: int
    now: float
    reforms: bool
    hands: dict[int, StepReport]

    def as_json(self) -> dict[str, Any]:
        """Return it as it travels."""
        hands = [[worker, *hand] for worker, hand in self.hands.items()]
        return {"table": [self.generation, self.now, self.reforms], "hands": hands}

    @classmethod
    def from_json(cls, text: dict[str, Any]) -> StepSummary:
        """Return what has travelled.

        >>> reports = {0: StepReport(1), 2: StepReport(1, 7, 0.5, 8, 0.1, 0.0, True, 0.2, 0.01)}
        >>> table = StepSummary(1, 0.25, False, reports)
        >>> StepSummary.from_json(table.as_json()).hands[2].samples
        8
        """
        hands = {worker: StepReport(*rest) for worker, *rest in text["hands"]}
        generation, now, reforms = text["table"]
        return cls(generation, now, reforms, hands)


class MembershipChanged(Exception):  # noqa: N818  # membership changes, which is no error
    """Others take part from here on."""


class RunFinished(Exception):  # noqa: N818  # which every run is some day
    """Rank 0 has ended the run.

    Attributes:
        end: what it says of it.
    """

    def __init__(self, end: dict[str, Any]) -> None:
        super().__init__(str(end))
        self.end = end
