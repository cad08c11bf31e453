"""The controllers of a phase, asked together."""

from __future__ import annotations

from typing import Any

from paceline.controllers.base import PRECEDENCE, Action, Controller, Moment
from paceline.protocols import Phase
from paceline.user_code import note_place


class Council:
    """The controllers of a phase, each with its state.

    Args:
        phase: that they belong to; no phase has none.
    """

    def __init__(self, phase: Phase | None = None) -> None:
        self._controllers: tuple[Controller[Any], ...] = phase.controllers if phase is not None else ()
        self._states: list[Any] = []
        self.reads_steps = any(each.reads == "steps" for each in self._controllers)

    def __bool__(self) -> bool:
        return bool(self._controllers)

    def begin(self, live: int) -> None:
        """Begin the phase with so many workers."""
        self._states = [each.begin(live) for each in self._controllers]

    def decide(self, moment: Moment) -> list[Action]:
        """Ask all of them, and return their answers in the order in which they are to be obeyed."""
        actions: list[Action] = []
        for i, controller in enumerate(self._controllers):
            try:
                self._states[i], answer = controller.decide(self._states[i], moment)
            except Exception as error:
                note_place(error, f"controller {controller!r} failed after update {moment.version}")
                raise
            actions += answer
        return sorted(actions, key=lambda action: PRECEDENCE.index(type(action)))

    def state_dict(self) -> list[Any]:
        """Return the state of each."""
        return [each.state_dict(state) for each, state in zip(self._controllers, self._states, strict=True)]

    def load_state_dict(self, states: list[Any]) -> None:
        """Go on from the states of the same controllers."""
        self._states = [each.load_state_dict(state) for each, state in zip(self._controllers, states, strict=True)]
