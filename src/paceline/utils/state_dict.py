"""State dicts of objects whose state is a set of attributes."""

from collections.abc import Iterable, Mapping
from copy import copy
from numbers import Real
from typing import Any, ClassVar, Protocol


class HasState(Protocol):
    """Object with a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data and tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""


class Stateful:
    """Object whose state dict has one entry for each of these attributes.

    An entry has the name of its attribute; a leading underscore of the attribute may be left out.

    Attributes:
        _saved: names of the entries that are copies of attributes.
        _parts: names of the entries that are state dicts of attributes, a list of them for a list; None for an
            attribute that is None.
        _defaults: values of entries that an early state may lack.

    Example:
        >>> class Counted(Stateful):
        ...     _saved = ("count",)
        ...     _count = 3
        >>> Counted().state_dict()
        {'count': 3}
    """

    __slots__ = ()
    _saved: ClassVar[tuple[str, ...]] = ()
    _parts: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        state = {name: copy(getattr(self, self._attribute(name))) for name in self._saved}
        for name in self._parts:
            part = getattr(self, self._attribute(name))
            if isinstance(part, list):
                state[name] = [each.state_dict() for each in part]
            else:
                state[name] = None if part is None else part.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state; a part is skipped if it is None here or in the state.

        Raises:
            TypeError: an entry is of another kind than its attribute.
            ValueError: a list of parts has another length.
        """
        state = {**self._defaults, **state}
        for name in self._saved:
            attribute = self._attribute(name)
            check_kind(name, state[name], getattr(self, attribute))
            setattr(self, attribute, copy(state[name]))
        for name in self._parts:
            part, saved = getattr(self, self._attribute(name)), state[name]
            if isinstance(part, list):
                for each, saved_of_it in zip(part, saved, strict=True):
                    each.load_state_dict(saved_of_it)
            elif part is not None and saved is not None:
                part.load_state_dict(saved)

    def _attribute(self, name: str) -> str:
        return f"_{name}" if hasattr(self, f"_{name}") else name


def check_kind(name: str, value: object, before: object) -> None:
    """Check that a value of a state is of the kind that it replaces: None, where that is None, is of any kind.

    Raises:
        TypeError: it is of another kind, as text in place of a number.

    >>> check_kind("count", 3, 0.0)
    >>> check_kind("count", "3", 0.0)
    Traceback (most recent call last):
    TypeError: count is '3', expected a value like 0.0
    """
    if value is not None and before is not None and _kind_of(value) is not _kind_of(before):
        raise TypeError(f"{name} is {str(value)[:40]!r}, expected a value like {str(before)[:40]}")


def check_numbers(name: str, values: Iterable[object]) -> None:
    """Check that all values of a state are numbers.

    Raises:
        TypeError: one is none.

    >>> check_numbers("costs", [0.5, 2])
    >>> check_numbers("costs", [0.5, ()])
    Traceback (most recent call last):
    TypeError: costs has (), expected numbers
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} has {str(value)[:40]}, expected numbers")


def _kind_of(value: object) -> type:
    for kind in (bool, str, Real, dict, set, list, tuple):
        if isinstance(value, kind):
            return kind
    return type(value)
