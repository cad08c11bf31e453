"""Errors of messages that cannot be decoded, with the names of message and field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

MAX_NAMED_BYTES = 1 << 16  # of a message whose wrong field is named


def with_names(content: bytes | memoryview, text: str, kinds: Mapping[str, type[Any]]) -> str:
    """Return the text of an error of msgspec with names in place of positions.

    Args:
        content: bytes of the message.
        text: text of the error.
        kinds: classes of messages, by name.
    """
    expected, _, place = text.partition(" - at ")
    kind: Any = kinds.get(_name_of(content)) if len(content) <= MAX_NAMED_BYTES else None
    if kind is None:
        return text
    names, first = [kind.__name__], 1  # the name of the message comes before its fields
    for position in map(int, re.findall(r"\[(\d+)\]", place)):
        known = getattr(kind, "__struct_fields__", getattr(kind, "_fields", None))
        if known is None:
            break
        names.append(known[position - first])
        kind, first = get_type_hints(kind).get(names[-1]), 0
    return f"{'.'.join(names)}: {expected[:1].lower()}{expected[1:]}"


def _name_of(content: bytes | memoryview) -> str:
    """Return the name with which a message begins; empty without one."""
    try:
        fields = msgspec.msgpack.decode(content, type=list[msgspec.Raw])
        return msgspec.msgpack.decode(fields[0], type=str) if fields else ""
    except (msgspec.DecodeError, RecursionError):
        return ""
