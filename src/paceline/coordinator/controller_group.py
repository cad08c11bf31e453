"""Controllers of a phase with their states."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from paceline.policies.controllers import base as control
from paceline.policies.controllers.balance import Balance
from paceline.protocols.protocol import Phase
from paceline.utils.user_code import note_place


class ControllerGroup:
    """Controllers of a phase with their states.

    Args:
        phase: phase that has the controllers; None for no controllers.
    """

    def __init__(self, phase: Phase | None = None) -> None:
        self._controllers: tuple[control.Controller[Any], ...] = () if phase is None else control.controllers_of(phase)
        self._states: list[Any] = []
        self.reads_steps = any(each.reads == "steps" for each in self._controllers)
        self.has_one_share = any(isinstance(each, Balance) and not each.queue for each in self._controllers)
        self.reads_work = any(each.reads_work for each in self._controllers)

    def begin(self, live: int) -> None:
        """Begin the phase.

        Args:
            live: number of live workers, >= 1.
        """
        self._states = [each.begin(live) for each in self._controllers]

    def decide(self, observation: control.Observation) -> list[control.Action]:
        """Return the actions of all controllers, in the order in which they are applied.

        A controller sees the protocol that one before it has changed to.
        """
        actions: list[control.Action] = []
        for i, controller in enumerate(self._controllers):
            try:
                self._states[i], answer = controller.decide(self._states[i], observation)
            except Exception as error:
                note_place(error, f"controller {controller!r} failed after update {observation.version}")
                raise
            actions += answer
            for action in answer:
                if isinstance(action, control.ChangeProtocol):
                    quorum = action.protocol.quorum
                    observation = replace(
                        observation, protocol=action.protocol, quorum=inf if quorum == "all" else quorum
                    )
        return sorted(actions, key=lambda action: control.PRECEDENCE.index(type(action)))

    def prepare(self) -> None:
        """Let the controllers do work of their next decisions."""
        for i, controller in enumerate(self._controllers):
            self._states[i] = controller.prepare(self._states[i])

    def state_dict(self) -> list[Any]:
        """Return the states."""
        return [each.state_dict(state) for each, state in zip(self._controllers, self._states, strict=True)]

    def load_state_dict(self, states: list[Any]) -> None:
        """Load the states of the same controllers."""
        self._states = [each.load_state_dict(state) for each, state in zip(self._controllers, states, strict=True)]
