"""Text helpers for messages: counts, lists and single lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def counted(amount: float, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, singular for one.

    Args:
        amount: count, >= 0.
        noun: singular noun.
        plural: plural noun; the singular with an s if not given.

    >>> [counted(amount, "update") for amount in (0, 1, 2)]
    ['0 updates', '1 update', '2 updates']
    >>> counted(1200, "minibatch", "minibatches"), counted(1.0, "epoch"), counted(0.5, "epoch")
    ('1200 minibatches', '1 epoch', '0.5 epochs')
    """
    return f"{amount:.12g} {noun if amount == 1 else plural or f'{noun}s'}"


def listed(noun: str, things: Sequence[object]) -> str:
    """Return a noun and a list of things, singular for one.

    >>> listed("seed", [1]), listed("seed", [1, 2, 5])
    ('seed 1', 'seeds 1, 2 and 5')
    """
    return f"{noun if len(things) == 1 else f'{noun}s'} {join_words(things)}"


def join_words(things: Iterable[object], conjunction: str = "and") -> str:
    """Return a list of things with commas, and a conjunction before the last one.

    >>> join_words(["bsp"]), join_words(["bsp", "asp", "ssp"]), join_words(["text", "None"], "or")
    ('bsp', 'bsp, asp and ssp', 'text or None')
    """
    *others, last = map(str, things)
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def in_one_line(text: str, longest: int | None = None) -> str:
    r"""Return a text on one line, cut to at most `longest` characters.

    >>> in_one_line("cannot\n  pickle"), in_one_line("cannot pickle a lock", longest=10)
    ('cannot pickle', 'cannot ...')
    """
    line = " ".join(text.split())
    return line if longest is None or len(line) <= longest else f"{line[: longest - 3]}..."


def printable(text: str, longest: int | None = None) -> str:
    r"""Return a text of another process without control characters, cut to at most `longest` characters.

    Line breaks and tabs stay. Bytes of file names that are not UTF-8, which cannot be encoded, are escaped too.

    >>> printable("\x1b[2Jgone\n", longest=20), printable("a" * 9, longest=7), printable("caf\udce9")
    ('\\x1b[2Jgone\n', 'aaaa...', 'caf\\udce9')
    """
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text[:longest])
    if longest is None or max(len(text), len(shown)) <= longest:
        return shown
    return f"{shown[: longest - 3]}..."


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def first_line(message: str) -> str:
    r"""Return the first non-blank line of a message.

    >>> first_line("ValueError: the first line\nand another")
    'ValueError: the first line'
    """
    return next((line.strip() for line in message.splitlines() if line.strip()), "an error without a message")
