"""Attributes of an object as they are, to be put away and put back."""

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any


def snapshot(instance: object, names: Iterable[str]) -> dict[str, Any]:
    """Return a copy of these attributes."""
    return {name: copy(getattr(instance, name)) for name in names}


def restore(instance: object, names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Put a copy of each attribute back."""
    for name in names:
        setattr(instance, name, copy(state[name]))
