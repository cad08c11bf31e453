"""Decision for the log, and its record; a new field is added here only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Decision(NamedTuple):
    """Decision for the log; the engine does nothing.

    Attributes:
        kind: word that all decisions of a sort share, for example "quorum".
        reason: text of the decision.
        worker: number of the worker that the decision is about; None for none.
        k: chosen quorum; None for none.
        numbers: numbers behind the decision, by name; None for none.
    """

    kind: str
    reason: str
    worker: int | None = None
    k: int | None = None
    numbers: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade:
    """Decision, such as a change of protocol, quorum or membership."""

    now_s: float
    kind: str
    reason: str
    worker: int | None = None
    k: int | None = None
    numbers: Mapping[str, float] | None = None

    @classmethod
    def of(cls, now_s: float, decision: Decision) -> DecisionMade:
        """Return the record of a decision."""
        return cls(now_s=now_s, **decision._asdict())
