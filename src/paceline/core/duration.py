"""Durations and points of a run, in updates, gradients, epochs, seconds or a fraction."""

from __future__ import annotations

from math import inf
from typing import Literal

from paceline.errors import UsageError
from paceline.utils.checked_dataclass import checked_dataclass

Unit = Literal["fraction", "updates", "gradients", "epochs", "seconds"]
UNITS: tuple[Unit, ...] = ("fraction", "updates", "gradients", "epochs", "seconds")


@checked_dataclass(frozen=True)
class Duration:
    """Duration, or point of a run counted from its beginning, in one unit.

    A fraction is a fraction of the whole workload. Gradients and epochs are workload too.

    Args:
        unit: "fraction", "updates", "gradients", "epochs" or "seconds".
        amount: amount in this unit, > 0; a fraction is < 1.

    Raises:
        UsageError: the unit is unknown, or the amount is out of its range.
    """

    unit: Unit
    amount: float

    def __post_init__(self) -> None:
        if not 0 < self.amount < inf or (self.unit == "fraction" and self.amount >= 1):
            limits = "0 < fraction < 1 (or 0% < x < 100%)" if self.unit == "fraction" else "a number > 0"
            raise UsageError(f"{self.unit} = {self.amount!r}, expected {limits}")

    def __str__(self) -> str:
        if self.unit == "fraction":
            return f"{self.amount:.12g} of the workload"
        return f"{self.amount:.12g} {self.unit}"

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read ``25%`` (of the workload), ``updates=100``, ``gradients=6400``, ``epochs=2`` or ``seconds=60``."""
        unit, _, amount = (part.strip() for part in text.partition("="))
        percent = text.strip().removesuffix("%")
        try:
            if percent != text.strip():
                return cls("fraction", float(percent) / 100)
            value = float(amount)
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{text.strip()!r} is no point of a run; expected 25%, updates=100, epochs=2 or seconds=60"
            ) from None
        return cls(unit, value)  # type: ignore[arg-type]  # checked when built

    @classmethod
    def of(cls, **amounts: float | None) -> Duration:
        """Return the duration that exactly one of the keyword arguments gives."""
        given = {unit: amount for unit, amount in amounts.items() if amount is not None}
        if len(given) != 1:
            raise UsageError(
                f"given {given or 'nothing'}, expected exactly one of {', '.join(UNITS)}, for example updates=100"
            )
        [(unit, amount)] = given.items()
        return cls(unit, amount)  # type: ignore[arg-type]  # checked when built

    def position(self, version: int, workload: int, now: float) -> float:
        """Return the position of a run in this unit; fractions and epochs must be converted to gradients before."""
        return {"updates": version, "gradients": workload, "seconds": now}[self.unit]

    def in_gradients(self, total: float | None, per_epoch: float | None) -> Duration:
        """Return the duration in gradients; updates and seconds stay as they are.

        Args:
            total: gradients of the whole run; None if its stop does not fix them.
            per_epoch: gradients of one epoch; None if the data have no length.
        """
        if self.unit == "fraction":
            if total is None:
                raise UsageError(
                    f"{self}: the stop does not fix the workload; add gradients= or epochs= to the stop, "
                    "or end the phase at updates=, gradients=, epochs= or seconds="
                )
            return Duration("gradients", self.amount * total)
        if self.unit == "epochs":
            if per_epoch is None:
                raise UsageError(f"{self}: these data have no length; give gradients= instead")
            return Duration("gradients", self.amount * per_epoch)
        return self
