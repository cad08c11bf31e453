"""Slices of the minibatches of an update, by the shares of the workers."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.events import Minibatch, MinibatchSlice
from paceline.errors import UsageError

WHOLE = Minibatch(0, None, None)


def cut(
    own: Mapping[int, Minibatch | None], draws: Mapping[int, int], shares: Mapping[int, int], batch_size: int
) -> dict[int, Minibatch | None]:
    """Return the work of each worker in an update.

    A worker keeps the first samples of its own minibatch. What workers with smaller shares leave is dealt in the order
    of workers to those with larger ones. Minibatches stay as they are if one of them is not whole.

    Args:
        own: minibatch of each worker; None where workers draw their samples themselves.
        draws: number of the draw of each worker.
        shares: samples of each worker.
        batch_size: samples of a whole minibatch, >= 1.

    Raises:
        UsageError: a share is empty, or the shares are not those of whole minibatches.

    Example:
        >>> work = cut({0: None, 1: None}, {0: 5, 1: 5}, {0: 3, 1: 1}, batch_size=2)
        >>> [(each.worker, each.begin, each.end) for each in work[0].slices], work[0].share
        ([(0, 0, 2), (1, 1, 2)], 1.5)
    """
    if sum(shares.values()) != len(own) * batch_size or min(shares.values()) < 1:
        raise UsageError(
            f"a controller asked for the shares {dict(shares)} in {len(own)} minibatches of {batch_size} samples; "
            f"expected at least one sample each, and {len(own) * batch_size} in all"
        )
    whole = {worker: minibatch or WHOLE for worker, minibatch in own.items()}
    if any(minibatch.slices for minibatch in whole.values()):
        return dict(own)
    workers = sorted(own)
    slices = {
        worker: MinibatchSlice(
            worker=worker, draw=draws[worker], epoch=each.epoch, number=each.number, begin=0, end=batch_size
        )
        for worker, each in whole.items()
    }
    left = [slices[worker]._replace(begin=shares[worker]) for worker in workers if shares[worker] < batch_size]
    work: dict[int, Minibatch | None] = {}
    for worker in workers:
        kept = slices[worker]._replace(end=min(shares[worker], batch_size))
        taken, left = _taken(left, shares[worker] - kept.end)
        work[worker] = whole[worker]._replace(slices=(kept, *taken), share=shares[worker] / batch_size)
    return work


def _taken(left: list[MinibatchSlice], samples: int) -> tuple[list[MinibatchSlice], list[MinibatchSlice]]:
    """Return the first samples of some slices, and the rest of the slices."""
    taken = []
    while samples:
        first, *left = left
        end = min(first.end, first.begin + samples)
        taken.append(first._replace(end=end))
        samples -= end - first.begin
        if end < first.end:
            left = [first._replace(begin=end), *left]
    return taken, left
