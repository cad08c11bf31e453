"""Parameter server of a simulation: real gradients, each computed at its version, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.clusters.simulated import Cluster
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, Interrupt, Measured, Step
from paceline.core.gradient import NOT_MEASURED
from paceline.core.wire import parse_wire
from paceline.engines.loop import RunLoop
from paceline.engines.ports import Parameters
from paceline.engines.server_side import compensated
from paceline.engines.virtual.compressed_transfers import transfers_of
from paceline.engines.virtual.timing import TimedWorkers
from paceline.protocols.local_steps import LocalSteps
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.version_store import VersionStore
from paceline.utils.state_dict import Stateful
from paceline.utils.user_code import at_place
from paceline.worker.local_steps import LocalStepsReplica
from paceline.worker.minibatch_forecast import UpcomingMinibatch
from paceline.worker.replica import Replica
from paceline.worker.task_progress import TaskProgress


class SimulatedServer(Stateful, Parameters):
    """Parameters of a simulation with a server. A gradient is computed when it arrives, if it will be accepted.

    Args:
        workers: simulated workers.
        replica: replica that computes all gradients and evaluations.
        server: owner of the parameters.
        wire: format on the network, as in `Torchrun`.
    """

    _saved = ("work",)
    _parts = ("versions", "optimizers", "transfers")

    def __init__(self, workers: TimedWorkers, replica: Replica, server: ParameterServer, wire: str) -> None:
        device = server.device
        self._workers = workers
        self._replica = replica
        self._optimizers = replica if isinstance(replica, LocalStepsReplica) else None  # of the workers' local steps
        replica.is_bound_to_server = self._optimizers is None
        self._transfers = transfers_of(parse_wire(wire), replica.layout)
        self._server = server
        self._versions = VersionStore(lambda: replica.layout.allocate(device))
        self._gradient = replica.layout.allocate(device)
        self._work: dict[int, Compute] = {}
        server.publish(self._versions.publish(0))

    @property
    def not_finite(self) -> str:
        """Why the parameters are not finite; empty while they are."""
        return self._server.not_finite

    def resume_at(self, version: int) -> None:
        """Begin with the parameters of the server as this version."""
        self._server.publish(self._versions.publish(version))

    def begin(self) -> None:
        """Do nothing: the first version is published."""

    def assigned(self, command: Compute) -> None:
        """Keep the version until the gradient arrives."""
        old = self._work.pop(command.worker, None)
        if old is not None:  # the worker was declared lost and has joined again
            self._versions.release(old.version)
        self._versions.acquire(command.version)
        self._work[command.worker] = command
        if self._transfers is not None:
            self._transfers.receive(command.worker, command.version, self._versions[command.version])

    def cancelled(self, command: Interrupt) -> None:
        """Release the version of a task."""
        self._versions.release(self._work.pop(command.worker).version)

    def lost(self, worker: int) -> None:
        """Release the version of a worker's task, and forget what the worker has."""
        work = self._work.pop(worker, None)
        if work is not None:
            self._versions.release(work.version)
        if self._optimizers is not None:
            self._optimizers.forget(worker)
        if self._transfers is not None:
            self._transfers.forget(worker)

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return an arrival with the gradient that is computed now; without it if it will not be accepted."""
        work = self._work.get(arrival.worker)
        if work is None or work.draw != arrival.draw:
            return arrival
        del self._work[arrival.worker]
        measured = NOT_MEASURED._replace(samples=0)
        is_used = coordinator.would_accept(arrival.worker, arrival.draw)
        if is_used or self._transfers is not None:  # it would be sent and dropped
            measured = self._compute_gradient(work, arrival.measured.minibatches)
        timed = arrival.measured
        measured = measured._replace(compute_s=timed.compute_s, minibatches=timed.minibatches)
        arrival = compensated(
            arrival=arrival._replace(measured=measured),
            coordinator=coordinator,
            server=self._server,
            version=work.version,
            then=self._versions[work.version],
            gradient=self._gradient,
        )
        self._versions.release(work.version)
        if timed.finite:
            return arrival
        return arrival._replace(measured=arrival.measured._replace(finite=False))  # by a scripted fault

    def accept(self, command: Accept) -> None:
        """Enqueue the gradient of the latest arrival."""
        self._server.enqueue(self._gradient, command.weight, command.step_scale, command.worker)

    def apply(self, command: Apply) -> Step | None:
        """Make the update and publish it."""
        return self._server.apply(command, self._versions.publish(command.version))

    def evaluation(self, version: int) -> dict[str, float]:
        """Return the metrics of a version."""
        return self._replica.evaluate(self._versions[version])

    def gather(self) -> None:
        """Do nothing: the server has made it."""

    def accumulate(self) -> None:
        """Do nothing: the only gradient is read when the next one is computed."""

    def check(self, now: float) -> None:
        """Do nothing: only real runs are debugged."""

    def close(self) -> None:
        """End the background processes of the replica."""
        self._replica.close()

    def _compute_gradient(self, work: Compute, minibatches: int) -> Measured:
        self._server.flush()  # the next gradient overwrites the only gradient buffer
        if self._replica.prefetches:
            self._replica.prefetch(self._in_flight())
        self._replica.progress = TaskProgress.of(work)
        if self._optimizers is not None:
            self._optimizers.steps = minibatches
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
        for worker, draw in self._workers.in_flight():
            if worker in self._work:
                yield UpcomingMinibatch(worker, draw, self._work[worker].minibatch)


def simulated_server(
    cluster: Cluster, seed: int, replica: Replica, server: ParameterServer, local_steps: LocalSteps | None = None
) -> RunLoop:
    """Return the loop of a simulation with a server and real gradients.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        replica: replica that computes all gradients and evaluations.
        server: owner of the parameters.
        local_steps: local steps that the replica makes; None for none.
    """
    workers = TimedWorkers(cluster, seed, replica.layout.gradient_nbytes, local_steps, keeps_times=True)
    parameters = SimulatedServer(workers, replica, server, cluster.network.wire)
    workers.evaluation = parameters.evaluation
    return RunLoop(workers, parameters, workers, simulated=[workers, parameters])
