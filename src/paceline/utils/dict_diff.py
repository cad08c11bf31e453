"""Differences between nested mappings, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paceline.utils.wording import printable

LONGEST = 400  # characters of a value, or of its name
Description = Mapping[str, Any]


class Difference(NamedTuple):
    """One entry that differs.

    Attributes:
        name: name of the entry, after the names of the mappings around it.
        one: value in the first mapping; None if absent.
        other: value in the second mapping; None if absent.
    """

    name: str
    one: Any
    other: Any


def differences(one: Description, other: Description, within: str = "") -> Iterator[Difference]:
    """Yield the entries that differ between two mappings."""
    for key in [*one, *(key for key in other if key not in one)]:
        first, second = one.get(key), other.get(key)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            yield from differences(first, second, f"{within}{key} ")
        elif first != second:
            yield Difference(f"{within}{key}", first, second)


def changes(before: Description, now: Description) -> list[str]:
    """Return a text for each entry that has changed.

    Example:
        >>> changes({"seed": 0, "model": {"w": "float32[2]"}}, {"seed": 1, "model": {"w": "float32[3]"}})
        ['seed 0, now 1', 'model w float32[2], now float32[3]']
    """
    found = differences(before, now)
    return [f"{_rendered(name)} {_rendered(old)}, now {_rendered(new)}" for name, old, new in found]


def _rendered(value: Any) -> str:
    return "not set" if value is None else printable(str(value), LONGEST)
