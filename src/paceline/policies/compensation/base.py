"""What a compensator sees of a gradient, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from math import inf
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from paceline.core.sharding import FullVector
from paceline.errors import UsageError
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.protocols.protocol import Phase

    Memory = dict[str, list[Tensor]]

Kind = Literal["scale", "correction"]
BLOCK = 2**16  # elements; a few blocks fit into a core's cache, so that what is in between costs no memory traffic


class StaleGradient:
    """A gradient that was accepted, with the parameters now and those that it was computed at.

    Args:
        staleness: versions made since those, >= 0.
        learning_rate: the optimizer's own, the largest of its parameter groups.
        squared_norm: of the gradient.
        gradient: flat vectors, one a dtype, which a compensator may change.
        now: parameters that it will change, likewise.
        then: parameters that it was computed at.
        whole: of which these vectors may be one slice; None if they are all there is.
    """

    def __init__(
        self,
        staleness: int,
        learning_rate: float,
        squared_norm: float,
        gradient: Sequence[Tensor],
        now: Sequence[Tensor],
        then: Sequence[Tensor],
        whole: FullVector | None = None,
    ) -> None:
        self.staleness = staleness
        self.learning_rate = learning_rate
        self.squared_norm = squared_norm
        self.gradient = gradient
        self._now = now
        self._then = then
        self._squared_distance = None if staleness else 0.0
        self._whole = whole or FullVector(sum(flat.numel() for flat in gradient), list)

    @property
    def elements(self) -> int:
        """How many the whole gradient has."""
        return self._whole.elements

    def total(self, share: float) -> float:
        """Return a sum over all elements of the whole, given that over the elements of these vectors.

        Every slice has to ask for it, so whether it is asked for may depend on nothing that a slice has for itself.
        """
        [total] = self._whole.summed([share])
        return total

    @property
    def squared_distance(self) -> float:
        """||w_now - w_then||^2; inf where it is no number, because training has exploded."""
        if self._squared_distance is None:
            total = self.total(sum(squared_norm(difference) for _, difference in self.blocks()))
            self._squared_distance = total if total < inf else inf
        return self._squared_distance

    def blocks(self, *beside: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Go through the vectors once: yield blocks of g, of w_now - w_then, and of the vectors beside.

        The difference is a copy that may be changed.
        """
        for vectors in zip(self.gradient, self._now, self._then, *beside, strict=True):
            for gradient, now, then, *others in zip(*(vector.split(BLOCK) for vector in vectors), strict=True):
                yield gradient, now.sub(then), *others


class Compensator(ABC):
    """A rule for stale gradients; a frozen dataclass of its knobs.

    A gradient that is not stale is never changed. A subclass of your own overrides `formula` and `compensate`.

    Attributes:
        name: by which it is typed, with its knobs.
        kind: "scale", if the factor is one for the length of the step, or "correction" of the gradient itself.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]

    def __repr__(self) -> str:
        return short_repr(self, self.name)

    @property
    @abstractmethod
    def formula(self) -> str:
        """What is computed, for the log."""

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase with this compensator after those that it has."""
        return replace(phase, compensators=chain(*phase.compensators, self))

    @abstractmethod
    def compensate(self, delayed: StaleGradient, memory: Memory) -> float:
        """Return the factor for a gradient, a scale in (0, inf); a correction changes the gradient in place.

        Elements that are 0 have to stay 0: they may be of parameters that the worker did not use, and it does not
        write those again. The vectors may be one slice of the whole: a sum over elements goes through `delayed.total`.

        Args:
            delayed: the gradient.
            memory: vectors by name, empty at first, each as long as those of the gradient, that are kept from gradient
                to gradient and in checkpoints.
        """


@checked_types
def chain(*compensators: Compensator) -> tuple[Compensator, ...]:
    """Return compensators that act one after another; scales multiply.

    Raises:
        UsageError: one is given twice, or two correct the same delay, or one is not whole.

    Example:
        >>> from paceline import dc_asgd, staleness_lr
        >>> chain(staleness_lr(C=0.01), dc_asgd(lambda0=0.04))
        (staleness_lr(C=0.01), dc_asgd(lambda0=0.04))
    """
    for given in compensators:
        if not isinstance(given, Compensator):
            raise UsageError(f"{given!r} is no compensator; expected one such as pl.staleness_lr(C=0.01)")
        if not is_dataclass(given) or getattr(given, "kind", None) not in get_args(Kind):
            raise UsageError(
                f"{type(given).__name__} is not whole: expected a frozen dataclass with a name, and with "
                "kind = 'scale' or 'correction'"
            )
    kinds = [type(compensator) for compensator in compensators]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(f"{kind.name} is given twice; expected one, because it would act twice on each gradient")
    corrections = [compensator for compensator in compensators if compensator.kind == "correction"]
    if len(corrections) > 1:
        raise UsageError(
            f"{corrections[0]!r} and {corrections[1]!r} would both correct a gradient for the same delay; expected one"
        )
    return compensators


def squared_norm(vector: Tensor) -> float:
    """Return ||v||^2; half precision is summed in single, which does not overflow."""
    wide = vector.float() if vector.element_size() < 4 else vector
    return float(wide.dot(wide))
