"""What two descriptions do not have in common, down to single entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Description = Mapping[str, Any]


class Difference(NamedTuple):
    """One entry that is not the same.

    Attributes:
        name: of the entry, after those of the mappings that it lies in.
        one: None if it is not there.
        other: likewise.
    """

    name: str
    one: Any
    other: Any


def differences(one: Description, other: Description, within: str = "") -> Iterator[Difference]:
    """Yield what is not the same in two mappings."""
    for key in [*one, *(key for key in other if key not in one)]:
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from differences(first, second, f"{within}{key} ")
        elif first != second:
            yield Difference(f"{within}{key}", first, second)


def changes(before: Description, now: Description) -> list[str]:
    """Return in words what is no longer the same.

    Example:
        >>> changes({"seed": 0, "model": {"w": "float32[2]"}}, {"seed": 1, "model": {"w": "float32[3]"}})
        ['seed 0, now 1', 'model w float32[2], now float32[3]']
    """
    return [f"{name} {_told(old)}, now {_told(new)}" for name, old, new in differences(before, now)]


def _told(value: Any) -> str:
    return "not there" if value is None else str(value)
