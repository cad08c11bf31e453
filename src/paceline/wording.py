"""Counts and lists in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(amount: float, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, in the singular for one.

    Args:
        amount: number of things.
        noun: the name of one of them.
        plural: the name of several, the noun with an s if not given.

    >>> [counted(amount, "update") for amount in (0, 1, 2)]
    ['0 updates', '1 update', '2 updates']
    >>> counted(1200, "minibatch", "minibatches"), counted(1.0, "epoch"), counted(0.5, "epoch")
    ('1200 minibatches', '1 epoch', '0.5 epochs')
    """
    return f"{amount:.12g} {noun if amount == 1 else plural or f'{noun}s'}"


def listed(noun: str, things: Sequence[object]) -> str:
    """Return a noun and the things that it stands for, in the singular for one.

    >>> listed("seed", [1]), listed("seed", [1, 2, 5])
    ('seed 1', 'seeds 1, 2 and 5')
    """
    return f"{noun if len(things) == 1 else f'{noun}s'} {joined(things)}"


def joined(things: Iterable[object]) -> str:
    """Return things with commas between them, and "and" before the last one.

    >>> joined(["bsp"]), joined(["bsp", "asp", "ssp"])
    ('bsp', 'bsp, asp and ssp')
    """
    *others, last = map(str, things)
    return f"{', '.join(others)} and {last}" if others else last
