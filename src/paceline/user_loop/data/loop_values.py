"""Values that a loop keeps from task to task: frozen parameters that it changes, and the place in its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from paceline.user_loop.data.data_place import DataPlace
from paceline.user_loop.data.frozen_parameters import FrozenParameters
from paceline.worker.kept_values import KeptValues

OF_DATA = "data/"  # before the names of the values of the place in the data


class LoopValues(KeptValues):
    """Values of one loop, of which a checkpoint may need those at the start of each task.

    Args:
        frozen: frozen parameters of the model.
        place: place in the data.

    Attributes:
        save: see `KeptValues`.
    """

    save: Callable[[Mapping[str, Tensor]], None] | None

    def __init__(self, frozen: FrozenParameters, place: DataPlace) -> None:
        self._frozen = frozen
        self._place = place
        self._at_start: Mapping[str, Tensor] = {}
        self.save = None

    def start_task(self) -> None:
        """Copy the values for the task of which the loop takes the first batch."""
        self._at_start = self._values()

    def take_start(self) -> Mapping[str, Tensor]:
        """Return the copies of the newest task, once."""
        taken, self._at_start = self._at_start, {}
        return taken

    def end(self) -> None:
        """Save the values after the last task, if a checkpoint needs them."""
        save, self.save = self.save, None
        if save is not None:
            save(self._values())

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Continue with saved values.

        Raises:
            KeyError: a parameter of that name is missing, or not frozen.
            RuntimeError: a parameter has another shape.
        """
        of_data = {name.removeprefix(OF_DATA): each for name, each in values.items() if name.startswith(OF_DATA)}
        self._place.restore(of_data)
        self._frozen.restore({name: each for name, each in values.items() if not name.startswith(OF_DATA)})

    def _values(self) -> dict[str, Tensor]:
        return self._frozen.values() | {OF_DATA + name: each for name, each in self._place.values().items()}
