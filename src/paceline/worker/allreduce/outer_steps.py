"""Steps of an outer optimizer on the average of workers without a server."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.protocols.outer_optimizer import OuterSGD


def begin_outer(average: Sequence[Tensor], memory: dict[str, list[Tensor]]) -> None:
    """Store the average from which the workers step; nothing if it is stored.

    Args:
        average: flat vectors of the average.
        memory: vectors that outlive this call, empty before the first one.
    """
    if not memory:
        memory["start"] = [flat.clone() for flat in average]
        memory["momentum"] = [flat.new_zeros(flat.shape) for flat in average]


def step_outer(
    outer: OuterSGD, average: Sequence[Tensor], memory: dict[str, list[Tensor]], fragment: slice = slice(None)
) -> None:
    """Change the mean of the workers' parameters to the next average, in place.

    Args:
        outer: optimizer.
        average: flat vectors of the mean.
        memory: vectors that `begin_outer` has stored.
        fragment: flat vectors that are changed; all of them by default.
    """
    vectors = zip(average[fragment], memory["start"][fragment], memory["momentum"][fragment], strict=True)
    for now, start, momentum in vectors:
        change = start - now
        momentum.mul_(outer.momentum).add_(change)
        change = change.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        start.sub_(change, alpha=outer.lr)
        now.copy_(start)
