"""Parameters and gradients of a run with a parameter server in this process."""

from __future__ import annotations

from collections.abc import Callable, Container
from math import inf, prod
from sys import float_info
from typing import Protocol

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, Interrupt, Step
from paceline.engines.task_board import ProcessParameters
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.tensors.version_store import VersionStore
from paceline.worker.parameter_guard import ParameterGuard


class OtherShards(Protocol):
    """Servers of the other shards, which do what this one does."""

    def compensate(self, arrival: Arrival, coordinator: Coordinator, version: int) -> None:
        """Compensate the parts of a gradient that was computed at this version."""

    def accept(self, command: Accept, below: float) -> None:
        """Add the parts of a gradient to the pending update, and then those of workers below a number."""

    def apply(self, update: Apply, is_read: bool) -> None:
        """Make an update, in other storage if the previous version is still read."""


class ServerSide(ProcessParameters):
    """Versions in use, gradients that wait for the coordinator, and the server.

    A worker writes its gradient only between a task's start and its end; the server reads the gradient only before
    it gives the worker the next task. A version is written before it is published, and its storage is reused only
    when all its readers have released it.

    Args:
        server: server of the parameters.
        versions: storage of the versions.
        gradients: storage for the gradient of each worker.
        allocate: function that returns memory for the trained parameters, if that of the versions ends with the run.
        shards: servers of the other shards; None without any.
        debug: whether a script that changes the server's model is detected.
        deterministic: whether gradients are added in the order of workers; else as they arrive.

    Attributes:
        versions: as given.
    """

    def __init__(
        self,
        server: ParameterServer,
        versions: VersionStore,
        gradients: list[FlatBuffers],
        *,
        allocate: Callable[[], FlatBuffers] | None = None,
        shards: OtherShards | None = None,
        debug: bool = False,
        deterministic: bool = True,
    ) -> None:
        self._allocate = allocate
        self.versions = versions
        self._first_version = 0
        self._shards = shards
        self._server = server
        self._gradients = gradients
        self._guard = ParameterGuard.for_model(server.model) if debug else None
        self._read_by: dict[tuple[int, int], int] = {}  # version of a complete gradient, by worker and draw
        self._deterministic = deterministic
        self._draws: dict[int, int] = {}  # of tasks whose gradient may still be accepted, by worker

    @property
    def not_finite(self) -> str:
        """Why the parameters are not finite; empty while they are."""
        return self._server.not_finite

    @property
    def first_version(self) -> int:
        """Version that the run begins with."""
        return self._first_version

    def resume_at(self, version: int) -> None:
        """Begin with what the server holds as this version."""
        self._first_version = version

    def begin(self) -> None:
        """Publish the first version, in storage that no worker reads."""
        self._server.publish(self.versions.publish(self._first_version))
        self._snapshot()

    def assigned(self, command: Compute) -> None:
        """Read a gradient that is held: the worker's next gradient overwrites the previous one."""
        self._server.flush(command.worker)
        self._draws[command.worker] = command.draw

    def cancelled(self, command: Interrupt) -> None:
        """Note that a gradient does not come; the worker reads its version until it has cancelled the task."""
        self._draws.pop(command.worker, None)

    def lost(self, worker: int) -> None:
        """Note that a gradient does not come; the versions of the worker were released when its process ended."""
        self._draws.pop(worker, None)

    def acquire(self, version: int) -> None:
        """Keep a version, which a worker reads."""
        self.versions.acquire(version)

    def release(self, version: int) -> None:
        """Let the memory of a version be used again when no worker reads it."""
        self.versions.release(version)

    def received(self, worker: int, draw: int, missing: Container[int], version: int | None) -> None:
        """Note a complete gradient, or its notice, as `TaskParameters` says."""
        self._gradients[worker].receive(missing)
        if version is not None:
            self.versions.acquire(version)
            self._read_by[worker, draw] = version

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return an arrival with its gradient compensated, if it will be accepted."""
        if self._draws.get(arrival.worker) == arrival.draw:
            del self._draws[arrival.worker]
        version = self._read_by.pop((arrival.worker, arrival.draw), None)
        if version is None:
            return arrival
        if self._shards is not None and will_be_compensated(arrival, coordinator):
            self._shards.compensate(arrival, coordinator, version)
        arrival = compensated(
            arrival=arrival,
            coordinator=coordinator,
            server=self._server,
            version=version,
            then=self.versions[version],
            gradient=self._gradients[arrival.worker],
        )
        self.versions.release(version)
        return arrival

    def accept(self, command: Accept) -> None:
        """Add the gradient of a worker to the pending update."""
        if self._shards is not None:
            self._shards.accept(command, self._below)
        gradient = self._gradients[command.worker]
        self._server.enqueue(gradient, command.weight, command.step_scale, command.worker)

    def apply(self, command: Apply) -> Step | None:
        """Make the update and publish it."""
        if self._shards is not None:
            self._shards.apply(command, is_read=self.versions.is_newest_read)
        step = self._server.apply(command, self.versions.publish(command.version))
        self._snapshot()
        return step

    def gather(self) -> None:
        """Do nothing: the server has made it, and asks other shards when it is saved."""

    def accumulate(self) -> None:
        """Add gradients that are held to the mean."""
        if self._server.has_queued:
            self._server.accumulate(self._below)

    @property
    def _below(self) -> float:
        """Lowest number of a worker that may still have a gradient in the pending update; inf if that is no matter."""
        return min(self._draws, default=inf) if self._deterministic else inf

    def close(self) -> None:
        """Move the parameters to memory of their own, if that of the versions ends with the run."""
        if self._allocate is not None:
            self._server.publish(self._allocate())

    def check(self, now: float) -> None:
        """Check that nothing else has changed the parameters."""
        if self._guard is not None:
            self._guard.check("the server", f"after version {self.versions.newest} was made, at {now:.3g} s")

    def _snapshot(self) -> None:
        if self._guard is not None:
            self._guard.snapshot()


def compensated(
    arrival: Arrival,
    coordinator: Coordinator,
    server: ParameterServer,
    version: int,
    then: FlatBuffers,
    gradient: FlatBuffers,
) -> Arrival:
    """Compensate a gradient for its staleness if it will be accepted; return its arrival with the compensations.

    A correction that overflows makes the gradient non-finite, so that it is dropped.

    Args:
        arrival: arrival, not yet reported.
        coordinator: coordinator with the compensators of the phase.
        server: server with the current parameters.
        version: version at which the gradient was computed.
        then: parameters of that version.
        gradient: gradient; changed in place.
    """
    if not will_be_compensated(arrival, coordinator):
        return arrival
    compensators = coordinator.compensators
    staleness = coordinator.version - version
    done, finite = server.compensate(compensators, gradient, then, staleness, arrival.measured.squared_norm)
    scales = [each.factor for each, by in zip(done, compensators, strict=True) if by.kind == "scale"]
    step_scale = max(prod(scales, start=1.0), float_info.min)  # a product may underflow, and weights may not be 0
    measured = arrival.measured._replace(finite=finite)
    return arrival._replace(measured=measured, step_scale=step_scale, compensations=done)


def will_be_compensated(arrival: Arrival, coordinator: Coordinator) -> bool:
    """Return whether there are compensators, and the gradient is there, finite, and will be accepted."""
    is_whole = arrival.measured.finite and not arrival.is_notice
    return bool(coordinator.compensators) and is_whole and coordinator.would_accept(arrival.worker, arrival.draw)
