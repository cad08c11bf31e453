"""Slices of the minibatches of an update, by the shares of the workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from paceline.core.events import Minibatch, MinibatchSlice
from paceline.errors import UsageError

WHOLE = Minibatch(0, None, None)


def cut(
    own: Mapping[int, Minibatch | None], draws: Mapping[int, int], shares: Mapping[int, int], batch_size: int
) -> dict[int, Minibatch | None]:
    """Return the work of each worker in an update, of which each has one share.

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
    if any(minibatch is not None and minibatch.slices for minibatch in own.values()):
        return dict(own)
    first, _ = dealt(slices_of(own, draws, batch_size), shares)
    return {worker: lease(slices, batch_size) for worker, slices in first.items()}


def slices_of(
    own: Mapping[int, Minibatch | None], draws: Mapping[int, int], batch_size: int
) -> dict[int, tuple[MinibatchSlice, ...]]:
    """Return the samples of each minibatch as slices; the arguments are those of `cut`."""
    return {
        worker: minibatch.slices
        or (
            MinibatchSlice(
                worker=worker,
                draw=draws[worker],
                epoch=minibatch.epoch,
                number=minibatch.number,
                begin=0,
                end=batch_size,
            ),
        )
        for worker, minibatch in ((worker, own[worker] or WHOLE) for worker in sorted(own))
    }


def dealt(
    slices: Mapping[int, Sequence[MinibatchSlice]], shares: Mapping[int, int]
) -> tuple[dict[int, tuple[MinibatchSlice, ...]], deque[MinibatchSlice]]:
    """Return the slices of each share, and what is left.

    Args:
        slices: samples of the minibatch of each worker.
        shares: samples of each worker that has a share.
    """
    kept: dict[int, list[MinibatchSlice]] = {}
    left: deque[MinibatchSlice] = deque()
    for worker, each in slices.items():
        own = deque(each)
        kept[worker] = take(own, shares.get(worker, 0))
        left += own
    first = {}
    for worker, share in sorted(shares.items()):
        own_slices = kept.get(worker, [])
        first[worker] = (*own_slices, *take(left, share - samples_of(own_slices)))
    return first, left


def take(slices: deque[MinibatchSlice], samples: int) -> list[MinibatchSlice]:
    """Remove and return the first samples of some slices, at most as many as they have."""
    first = []
    while samples and slices:
        begun = slices.popleft()
        end = min(begun.end, begun.begin + samples)
        first.append(begun._replace(end=end))
        samples -= end - begun.begin
        if end < begun.end:
            slices.appendleft(begun._replace(begin=end))
    return first


def lease(slices: Sequence[MinibatchSlice], batch_size: int) -> Minibatch:
    """Return the work on some slices.

    Args:
        slices: one slice or more.
        batch_size: samples of a whole minibatch, >= 1.
    """
    share = samples_of(slices) / batch_size
    return Minibatch(0, slices[0].epoch, slices[0].number, slices=tuple(slices), share=share)


def samples_of(slices: Iterable[MinibatchSlice]) -> int:
    """Return the number of samples of some slices."""
    return sum(each.end - each.begin for each in slices)
