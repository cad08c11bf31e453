"""Dataclasses whose arguments are checked by their annotations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.utils.argument_types import T, checked_types

__all__ = ["checked_dataclass"]

if TYPE_CHECKING:  # type checkers know dataclasses by this decorator only
    from dataclasses import dataclass as checked_dataclass
else:

    def checked_dataclass(**options: bool) -> Callable[[T], T]:
        """Decorate a class as `dataclass` does, with arguments that `checked_types` checks.

        Args:
            options: options of `dataclass`.
        """
        return lambda kind: checked_types(dataclass(**options)(kind))
