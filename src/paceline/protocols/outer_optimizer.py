"""Outer optimizers: steps with the pseudo-gradients of workers that make local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral

from paceline.utils.argument_types import checked_types
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.spec_parser import bind, parse_call
from paceline.utils.validation import check_range


@checked_dataclass(frozen=True, repr=False)
class OuterSGD:
    """SGD with momentum on the pseudo-gradient Delta = w - mean of the workers' parameters.

        m = momentum m + Delta
        w = w - lr (Delta + momentum m)    with Nesterov's momentum
        w = w - lr m                       otherwise

    w is the average after the previous step, and m is 0 at first. With lr = 1 and no momentum, w is the mean.

    Args:
        lr: learning rate, > 0.
        momentum: in [0, 1).
        nesterov: whether the momentum is Nesterov's.

    Source: Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023, Algorithm 1.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("(0, inf)", lr=self.lr)
        check_range("[0, 1)", momentum=self.momentum)

    def __repr__(self) -> str:
        return f"{'nesterov' if self.nesterov else 'sgd'}(lr={self.lr:g}, momentum={self.momentum:g})"


@checked_dataclass(frozen=True, repr=False)
class DelayedNesterov:
    """SGD on pseudo-gradients, whose Nesterov momentum is updated and applied at every N-th update only.

    With Delta the pseudo-gradient of an update,

        m = momentum m + mean of the last N Deltas,  w = w - lr (momentum m + Delta / N)    at every N-th update
        w = w - lr Delta / N                                                                otherwise

    so that N updates move w as one Nesterov step with their mean does. It is for updates of single, stale gradients,
    whose momentum would be applied N times as often.

    Args:
        lr: learning rate, > 0.
        momentum: in [0, 1).
        every: N, >= 1, as a rule the number of workers.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", 2024, Algorithm 3, with c = 0: no part
    of the momentum is applied in between.
    """

    lr: float
    momentum: float
    every: int

    def __post_init__(self) -> None:
        check_range("(0, inf)", lr=self.lr)
        check_range("[0, 1)", momentum=self.momentum)
        check_range("[1, inf)", Integral, every=self.every)

    def __repr__(self) -> str:
        return f"delayed_nesterov(lr={self.lr:g}, momentum={self.momentum:g}, every={self.every})"


OuterOptimizer = OuterSGD | DelayedNesterov


@checked_types
def nesterov(lr: float = 0.7, momentum: float = 0.9) -> OuterSGD:
    """SGD with Nesterov's momentum, as in DiLoCo.

    Args:
        lr: learning rate, > 0.
        momentum: in [0, 1).
    """
    return OuterSGD(lr, momentum, nesterov=True)


@checked_types
def sgd(lr: float, momentum: float = 0.0) -> OuterSGD:
    """SGD with momentum.

    Args:
        lr: learning rate, > 0; with 1 and no momentum, the average is the mean of the workers' parameters.
        momentum: in [0, 1).
    """
    return OuterSGD(lr, momentum)


@checked_types
def delayed_nesterov(every: int, lr: float = 0.7, momentum: float = 0.9) -> DelayedNesterov:
    """Delayed Nesterov momentum, for updates of single gradients.

    Args:
        every: updates from one step of the momentum to the next, >= 1, as a rule the number of workers.
        lr: learning rate, > 0.
        momentum: in [0, 1).
    """
    return DelayedNesterov(lr, momentum, every)


OUTER: Mapping[str, Callable[..., OuterOptimizer]] = {
    "nesterov": nesterov,
    "sgd": sgd,
    "delayed_nesterov": delayed_nesterov,
}


def parse_outer(text: str) -> OuterOptimizer:
    """Read an outer optimizer.

    >>> parse_outer("nesterov(lr=0.5)")
    nesterov(lr=0.5, momentum=0.9)
    """
    return bind(parse_call(text, "nesterov(lr=0.7, momentum=0.9)"), OUTER)
