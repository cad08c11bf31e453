"""Interface of staleness compensators: a stale gradient in, a factor or a corrected gradient out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast, get_args

from paceline.errors import UsageError
from paceline.protocols.additions import CompensatorPart, Kind
from paceline.protocols.allreduce import AllReduceConfig
from paceline.protocols.protocol import Phase
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import short_repr
from paceline.utils.validation import check_range

if TYPE_CHECKING:
    from torch import Tensor

    Memory = dict[str, list[Tensor]]


class AdaptiveKnobs(NamedTuple):
    """Knobs of the adaptive correction.

    Attributes:
        m: decay of the mean square of the gradients, in [0, 1).
        epsilon: term against division by 0, > 0.
        lambda0: strength of the correction, >= 0.
    """

    m: float
    epsilon: float
    lambda0: float


class StaleGradient(ABC):
    """Accepted gradient, with the current parameters and those that it was computed at.

    Attributes:
        staleness: number of versions made since those parameters, >= 0.
        learning_rate: learning rate of the optimizer, the largest of its parameter groups, >= 0.
        squared_norm: squared norm of the whole gradient, >= 0.
        gradient: flat vectors of the gradient, one per dtype, which a compensator may change in place.
    """

    staleness: int
    learning_rate: float
    squared_norm: float
    gradient: Sequence[Tensor]

    @property
    @abstractmethod
    def elements(self) -> int:
        """Number of elements of the whole gradient."""

    @abstractmethod
    def total(self, share: float) -> float:
        """Return a sum over all elements of the full vector, given the sum over the elements of this shard.

        Every shard must call this. So whether it is called must not depend on the values of one shard.
        """

    @property
    @abstractmethod
    def squared_distance(self) -> float:
        """Squared distance ||w_now - w_then||^2; inf if it is not a number, because training has diverged."""

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """Whether all elements of the gradient are finite; one more pass, unless `correct` has changed it."""

    @abstractmethod
    def squared_length(self, scale: float) -> float:
        """Return ||scale g g (w_now - w_then)||^2 of the full vector, with products element by element."""

    @abstractmethod
    def zeros(self) -> list[Tensor]:
        """Return vectors of zeros, shaped like those of the gradient."""

    @abstractmethod
    def add_correction(self, lambda_: float) -> None:
        """Add lambda g g (w_now - w_then) to the gradient, with products element by element."""

    @abstractmethod
    def add_adaptive_correction(self, mean_square: Sequence[Tensor], knobs: AdaptiveKnobs) -> None:
        """Count the gradient in the mean square of all gradients, and correct it if it is stale.

        The mean square becomes m * mean_square + (1 - m) g g. Then lambda is lambda0 / sqrt(mean_square + epsilon),
        element by element, and a stale gradient gets lambda g g (w_now - w_then).
        """

    @abstractmethod
    def correct(self, change: Callable[..., object], *beside: Sequence[Tensor]) -> None:
        """Change the gradient in one pass.

        Args:
            change: function that gets the blocks of g, of w_now - w_then and of the further vectors, and changes the
                first one in place, and the others if it likes.
            beside: further vectors, each shaped like those of the gradient.
        """

    @abstractmethod
    def blocks(self, *beside: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Yield blocks of g, of w_now - w_then and of further vectors, in one pass.

        The difference is a copy, which the caller may change.
        """


class Compensator(CompensatorPart):
    """Base class of staleness compensators; each is a frozen dataclass of its knobs.

    A gradient that is not stale is never changed. A subclass overrides `formula` and `compensate`.

    Attributes:
        name: name on the command line.
        kind: "scale" for a factor on the step, or "correction" for a change of the gradient itself.
        reads_gradient: whether the factor depends on the elements of the gradient; a scale that does not read them is
            computed after a correction, whose pass measures the distance too.
    """

    reads_gradient: ClassVar[bool] = True

    def __repr__(self) -> str:
        return short_repr(self, self.name)

    @property
    @abstractmethod
    def formula(self) -> str:
        """Formula of the factor or the correction, for the log."""

    def added_to(self, phase: Phase) -> Phase:
        """Return the phase with this compensator added after its present ones."""
        return replace(phase, compensators=_checked((*compensators_of(phase), self)))

    @abstractmethod
    def compensate(self, stale: StaleGradient, memory: Memory) -> float:
        """Return the factor for a gradient; a scale is in (0, inf), a correction also changes the gradient in place.

        Elements that are 0 must stay 0: they may belong to parameters that the worker did not use, and the worker does
        not overwrite these. The vectors may be one shard: compute a sum over all elements with ``stale.total``.

        Args:
            stale: gradient with the parameters of then and now.
            memory: vectors by name, each shaped like those of the gradient; empty at first, kept from gradient to
                gradient and in checkpoints.
        """


@checked_types
def chain(*compensators: Compensator) -> tuple[Compensator, ...]:
    """Return compensators to apply one after another; scales multiply.

    Args:
        compensators: compensators in the order in which they are applied.

    Raises:
        UsageError: a compensator is given twice or is incomplete, or two are corrections.

    Example:
        >>> from paceline import dc_asgd, staleness_lr
        >>> chain(staleness_lr(C=0.01), dc_asgd(lambda0=0.04))
        (staleness_lr(C=0.01), dc_asgd(lambda0=0.04))
    """
    return _checked(compensators)


def _checked(compensators: tuple[Compensator, ...]) -> tuple[Compensator, ...]:
    for given in compensators:
        if not is_dataclass(given) or getattr(given, "kind", None) not in get_args(Kind):
            raise UsageError(
                f"{type(given).__name__} is incomplete: expected a frozen dataclass with a name, and with "
                "kind='scale' or kind='correction'"
            )
    kinds = [type(compensator) for compensator in compensators]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise UsageError(f"{kind.name} is given twice and would change each gradient twice; give it once")
    corrections = [compensator for compensator in compensators if compensator.kind == "correction"]
    if len(corrections) > 1:
        raise UsageError(
            f"{corrections[0]!r} and {corrections[1]!r} would both correct a gradient for the same delay; give one"
        )
    return compensators


def correction_of(allreduce: AllReduceConfig) -> Compensator | None:
    """Return the correction of gradients that overlap an all-reduce; None without one."""
    return cast("Compensator | None", allreduce.correction)


def compensators_of(phase: Phase) -> tuple[Compensator, ...]:
    """Return the compensators of a phase."""
    return cast("tuple[Compensator, ...]", phase.compensators)


def apply_compensators(
    compensators: Sequence[Compensator], stale: StaleGradient, memory: Callable[[Compensator], Memory]
) -> list[float]:
    """Apply compensators to a gradient, in as few passes as possible, and return the factor of each.

    Args:
        compensators: compensators, which may change the gradient.
        stale: gradient.
        memory: function that returns the vectors of a compensator.

    Raises:
        UsageError: a step scale is not in (0, inf).
    """
    factors = [0.0] * len(compensators)
    for i in sorted(range(len(compensators)), key=lambda i: not compensators[i].reads_gradient):
        compensator = compensators[i]
        factors[i] = compensator.compensate(stale, memory(compensator))
        if compensator.kind == "scale":
            check_range("(0, inf)", **{f"the step scale of {compensator.name}": factors[i]})
    return factors
