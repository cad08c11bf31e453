"""Parameter-server engine in virtual time, with real gradients."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from operator import itemgetter

from paceline.clusters.faults import Fault
from paceline.clusters.simulated import Cluster, RoundTrip
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Compute,
    Evaluate,
    Evaluated,
    Interrupt,
    Lost,
    Outcome,
)
from paceline.core.wire import parse_wire
from paceline.engines.server_side import compensated
from paceline.engines.virtual.compressed_transfers import transfers_of
from paceline.engines.virtual.timing import NOT_A_WORKER, TimingEngine
from paceline.protocols.local_steps import LocalSteps
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.version_store import VersionStore
from paceline.utils.user_code import at_place
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.replica import GradientStats, Replica, TaskProgress


class VirtualEngine(TimingEngine):
    """Simulated parameter server with real gradients, each computed at its version and only if it will be accepted.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        replica: replica that computes all gradients and evaluations.
        server: owner of the parameters.
        local_steps: local steps that the replica makes; None for none.
    """

    _saved = (*TimingEngine._saved, "work", "times")
    _parts = ("versions", "optimizers", "transfers")

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        replica: Replica,
        server: ParameterServer,
        local_steps: LocalSteps | None = None,
    ) -> None:
        super().__init__(cluster, seed, replica.layout.gradient_nbytes, local_steps)
        device = server.device
        self._replica = replica
        replica.is_bound_to_server = local_steps is None
        self._optimizers = replica if isinstance(replica, LocalStepsReplica) else None  # of the workers' local steps
        self._transfers = transfers_of(parse_wire(cluster.network.wire), replica.layout)
        self._server = server
        self._versions = VersionStore(lambda: replica.layout.allocate(device))
        self._gradient = replica.layout.allocate(device)
        self._work: dict[int, Compute] = {}
        self._times: dict[int, RoundTrip] = {}
        self._duration_s = self._stored_duration_s
        server.publish(self._versions.publish(0))

    def _close(self, error: BaseException | None) -> None:
        """End the background processes of the replica."""
        self._replica.close()

    def compute(self, command: Compute) -> None:
        """Keep the version until the gradient arrives."""
        old = self._work.pop(command.worker, None)
        if old is not None:  # the worker was declared lost and has joined again
            self._versions.release(old.version)
        self._versions.acquire(command.version)
        self._work[command.worker] = command
        if self._transfers is not None:
            self._transfers.receive(command.worker, command.version, self._versions[command.version])
        super().compute(command)

    def interrupt(self, command: Interrupt) -> None:
        """Drop the task and release its version."""
        super().interrupt(command)
        self._versions.release(self._work.pop(command.worker).version)

    def accept(self, command: Accept) -> None:
        """Enqueue the gradient of the latest arrival."""
        self._server.enqueue(self._gradient, command.samples, command.step_scale, command.worker)

    def apply(self, command: Apply) -> None:
        """Make the update and publish it."""
        super().apply(command)
        step = self._server.apply(command, self._versions.publish(command.version))
        self.report_step(command, step)
        if self._server.not_finite:
            self._at(self.now, AbortRun(self.now, Outcome.NOT_FINITE, self._server.not_finite))

    def evaluate(self, command: Evaluate) -> None:
        """Evaluate the version, in zero virtual time."""
        metrics = self._replica.evaluate(self._versions[command.version])
        self._at(self.now, Evaluated(self.now, command.version, metrics))

    def resume_at(self, version: int, now: float) -> None:
        """Start at this time, with the parameters of the server as this version."""
        super().resume_at(version, now)
        self._server.publish(self._versions.publish(version))

    def _lose(self, fault: Fault, reason: str) -> Lost:
        self._versions.release(self._work.pop(fault.worker).version)
        if self._optimizers is not None:
            self._optimizers.forget(fault.worker)
        if self._transfers is not None:
            self._transfers.forget(fault.worker)
        return super()._lose(fault, reason)

    def _arrival(self, worker: int, draw: int) -> Arrival:
        self._finish(worker)
        work = self._work.pop(worker)
        measured = GradientStats(loss=nan, samples=0, squared_norm=nan, variance=nan, finite=True, compute_s=0.0)
        if self._coordinator.would_accept(worker, draw) or self._transfers is not None:  # it would be sent and dropped
            measured = self._compute_gradient(work)
        times = self._times[worker]
        steps = self._steps.get(worker, 1)
        arrival = Arrival(self.now, worker, draw, **{**measured._asdict(), **times._asdict(), "minibatches": steps})
        then = self._versions[work.version]
        arrival = compensated(
            arrival=arrival,
            coordinator=self._coordinator,
            server=self._server,
            version=work.version,
            then=then,
            gradient=self._gradient,
        )
        self._versions.release(work.version)
        return arrival

    def _compute_gradient(self, work: Compute) -> GradientStats:
        self._server.flush()  # the next gradient overwrites the only gradient buffer
        if self._replica.prefetches:
            self._replica.prefetch(self._in_flight())
        self._replica.progress = TaskProgress.of(work)
        if self._optimizers is not None:
            self._optimizers.steps = self._steps[work.worker]
        transfers = self._transfers
        with at_place(f"after update {work.version}"):
            version = self._versions[work.version] if transfers is None else transfers.received(work.worker)
            measured = self._replica.gradient(work.worker, work.draw, work.minibatch, version, self._gradient)
        if transfers is not None and measured.finite:
            transfers.send(work.worker, self._gradient)
            self._gradient.receive(self._gradient.missing)
        return measured

    def _in_flight(self) -> Iterator[UpcomingMinibatch]:
        """Yield the tasks in flight, in the order of their arrivals."""
        for _, _, worker, draw in sorted(self._heap, key=itemgetter(0, 1)):
            if worker != NOT_A_WORKER and self._current[worker] == draw and worker in self._work:
                yield UpcomingMinibatch(worker, draw, self._work[worker].minibatch)

    def _local_round_trip(self, command: Compute, local_steps: LocalSteps) -> RoundTrip:
        self._times[command.worker] = times = super()._local_round_trip(command, local_steps)
        return times

    def _stored_duration_s(self, worker: int, draw: int, start_s: float, share: float = 1.0) -> float:
        self._times[worker] = times = self._round_trips.times(worker, draw, start_s, share)
        return times.total_s
