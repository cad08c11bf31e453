"""Parameters of rank 0, as its standby follows them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from paceline.checkpoint.fingerprint import digest_of
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, Event, Interrupt, Step
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.parameter_server.loop_options import set_step_options
from paceline.engines.distributed.transport.messages import FollowUpdate
from paceline.engines.distributed.transport.standby_messages import split_events
from paceline.engines.ports import Parameters
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

SAME_STATE = "than rank 0: give both the same folder to resume, and load a checkpoint of your own on all ranks"


def first_state(server: ParameterServer) -> str:
    """Return a digest of the state with which a server begins."""
    return digest_of(server.state_dict())


class HeldUpdate(NamedTuple):
    """Events of an update that the workers may lack.

    Attributes:
        version: version that the last one of them makes.
        events: events since the update before, one or more.
    """

    version: int
    events: Sequence[Event]


class FollowedParameters(Parameters):
    """Parameters of rank 0, at a process that handles the same events.

    Args:
        server: server of the parameters.

    Attributes:
        held: updates whose events are handled when it is certain that a worker has them.
        step: step of the newest update, if this process has measured it.
    """

    not_finite = ""

    def __init__(self, server: ParameterServer) -> None:
        self.held: list[HeldUpdate] = []
        self.step: Step | None = None
        self._server = server

    @abstractmethod
    def receive(self, message: FollowUpdate) -> Iterator[Event]:
        """Take a message of rank 0; return the events that are handled now."""

    def resume_at(self, version: int) -> None:
        """Do nothing: the server holds the version."""

    def begin(self) -> None:
        """Do nothing, as `resume_at`."""

    def assigned(self, command: Compute) -> None:
        """Do nothing: gradients are at rank 0."""

    def cancelled(self, command: Interrupt) -> None:
        """Do nothing, as `assigned`."""

    def lost(self, worker: int) -> None:
        """Do nothing, as `assigned`."""

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return the arrival, which rank 0 has compensated."""
        return arrival

    def accept(self, command: Accept) -> None:
        """Do nothing: the mean gradient comes from rank 0, or stays at the ranks."""

    def gather(self) -> None:
        """Do nothing, as `resume_at`."""

    def accumulate(self) -> None:
        """Do nothing, as `assigned`."""

    def check(self, now: float) -> None:
        """Do nothing: rank 0 checks."""

    def close(self) -> None:
        """Do nothing, as `resume_at`."""


class FollowedServer(FollowedParameters):
    """Parameters of a server, which this process makes too, from the mean gradients that rank 0 sends.

    Args:
        server: server of the parameters.
        layout: layout of the model.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout) -> None:
        super().__init__(server)
        self._layout = layout
        self._mean: FlatBuffers | None = None  # of the next update

    def receive(self, message: FollowUpdate) -> Iterator[Event]:
        """Take the mean gradient of an update, if there is one; return all events.

        Raises:
            RunError: rank 0 has begun with another state.
        """
        if message.first not in ("", first_state(self._server)):
            raise RunError(f"the standby begins with another state of the model or the optimizer {SAME_STATE}")
        if message.version:
            set_step_options(self._server, message.options)
            self._mean = FlatBuffers(self._layout, message.tensors["mean"])
            self._mean.receive(IndexBits(message.missing))
        return split_events(message.events)

    def apply(self, command: Apply) -> None:
        """Make the update of rank 0; the event of a measured step comes from there."""
        if command.is_skipped:
            self.step = self._server.apply(command)
            return
        if self._mean is None:
            raise RunError(
                f"the standby would make update {command.version}, which rank 0 has not made: it began with another "
                f"state {SAME_STATE}"
            )
        mean, self._mean = self._mean, None
        self._server.enqueue(mean, 1)
        self.step = self._server.apply(command)


class FollowedSums(FollowedParameters):
    """Parameters of ranks without a server, which this process gets from one of them when rank 0 is lost.

    Rank 0 sends the events of an update before it announces the update. So a rank may have the newest updates or lack
    them, but has none that this process does not know.
    """

    def receive(self, message: FollowUpdate) -> Iterator[Event]:
        """Hold the events of an update; return those of the updates that all ranks have."""
        if events := [*split_events(message.events)]:
            newest = self.held[-1].version if self.held else message.made
            self.held.append(HeldUpdate(message.version or newest, events))
        made = [update for update in self.held if update.version <= message.made]
        self.held = self.held[len(made) :]
        return chain.from_iterable(update.events for update in made)

    def apply(self, command: Apply) -> None:
        """Advance the schedule, since the rate of a record is that of rank 0."""
        self._server.advance_schedule(command.workload)
