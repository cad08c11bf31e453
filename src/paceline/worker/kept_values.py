"""Values that a worker keeps from task to task, and that no version has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor


class KeptValues(ABC):
    """Values of a worker that change from task to task, and that no version has.

    Attributes:
        save: called with the values after the last task, if the last checkpoint of the run needs them; else None.
    """

    save: Callable[[Mapping[str, Tensor]], None] | None

    @abstractmethod
    def take_start(self) -> Mapping[str, Tensor]:
        """Return the values at the start of the newest task, once; empty if none change, or before that start."""

    @abstractmethod
    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Continue with saved values.

        Raises:
            KeyError: a value is unknown.
            RuntimeError: a value has another shape.
        """
