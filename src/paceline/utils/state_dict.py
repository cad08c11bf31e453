"""Snapshots of attributes, for state dicts."""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any


def snapshot(instance: object, names: Iterable[str]) -> dict[str, Any]:
    """Return copies of attributes, by name."""
    return {name: copy(getattr(instance, name)) for name in names}


def restore(instance: object, names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Set attributes to copies of their saved values."""
    for name in names:
        setattr(instance, name, copy(state[name]))
