"""The controllers of a phase, asked together."""

from __future__ import annotations

from math import inf
from typing import Any

from paceline.core.duration import Duration
from paceline.policies.controllers.base import PRECEDENCE, Action, Controller, Observation
from paceline.protocols.protocol import Phase
from paceline.utils.user_code import note_place


class ControllerGroup:
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

    def decide(self, observation: Observation) -> list[Action]:
        """Ask all of them, and return their answers in the order in which they are to be obeyed."""
        actions: list[Action] = []
        for i, controller in enumerate(self._controllers):
            try:
                self._states[i], answer = controller.decide(self._states[i], observation)
            except Exception as error:
                note_place(error, f"controller {controller!r} failed after update {observation.version}")
                raise
            actions += answer
        return sorted(actions, key=lambda action: PRECEDENCE.index(type(action)))

    def state_dict(self) -> list[Any]:
        """Return the state of each."""
        return [each.state_dict(state) for each, state in zip(self._controllers, self._states, strict=True)]

    def load_state_dict(self, states: list[Any]) -> None:
        """Go on from the states of the same controllers."""
        self._states = [each.load_state_dict(state) for each, state in zip(self._controllers, states, strict=True)]


class PhaseProgress:
    """The part of a phase that counts towards its end.

    What is made under a protocol that a controller takes to in between may have to be made up for: then it does not
    count. Positions are those of the run, in the unit of the end.

    Example:
        >>> share = PhaseProgress(Duration("updates", 100))
        >>> share.pause(40)
        >>> share.go_on(70)
        >>> share.is_done(100), share.ends_at
        (False, 130.0)
    """

    def __init__(self, end: Duration | None) -> None:
        self.end = end
        self._left_out = 0.0
        self._paused_at: float | None = None

    @property
    def ends_at(self) -> float:
        """Where the phase will end, if nothing more is left out."""
        return inf if self.end is None else self.end.amount + self._left_out

    def is_done(self, position: float) -> bool:
        """Return whether a phase that is so far is at its end."""
        return (position if self._paused_at is None else self._paused_at) >= self.ends_at

    def pause(self, position: float) -> None:
        """Count no further from here on."""
        if self._paused_at is None:
            self._paused_at = position

    def go_on(self, position: float) -> None:
        """Count again from here on."""
        if self._paused_at is not None:
            self._left_out += position - self._paused_at
            self._paused_at = None

    def state_dict(self) -> dict[str, float | None]:
        """Return what was left out."""
        return {"left_out": self._left_out, "paused_at": self._paused_at}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Go on from such a state of the same end."""
        self._left_out = state["left_out"] or 0.0
        self._paused_at = state["paused_at"]
