"""Errors of messages that cannot be decoded, with the names of message and field."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_type_hints


def with_names(text: str, kind: Any) -> str:
    """Return the text of an error of msgspec with names in place of positions.

    Args:
        text: text of the error.
        kind: class of the message.
    """
    expected, _, place = text.partition(" - at ")
    names, first = [kind.__name__], 1  # the name of the message comes before its fields
    for position in map(int, re.findall(r"\[(\d+)\]", place)):
        known = getattr(kind, "__struct_fields__", getattr(kind, "_fields", None))
        if known is None:
            break
        names.append(known[position - first])
        kind, first = _hints_of(kind).get(names[-1]), 0
    return f"{'.'.join(names)}: {expected[:1].lower()}{expected[1:]}"


def name_of(content: bytes | memoryview) -> str:
    """Return the name with which a message, an array, begins; empty without a name of at most 31 letters."""
    found = _BEGINNING.match(content)
    if found is None:
        return ""
    length = found[1][0] - _NO_LETTERS
    return bytes(content[found.end() :][:length]).decode(errors="replace")


_hints_of = cache(get_type_hints)  # they are evaluated anew at each call, which takes milliseconds
_NO_LETTERS = 0xA0  # first byte of a text without letters
_BEGINNING = re.compile(rb"(?:[\x90-\x9f]|\xdc..|\xdd....)([\xa0-\xbf])", re.DOTALL)
