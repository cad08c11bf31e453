"""Parameters of a simulation without a server: real gradients and sums, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from paceline.clusters.simulated import Cluster
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, Interrupt, Step
from paceline.core.wire import parse_wire
from paceline.engines.loop import RunLoop
from paceline.engines.ports import Parameters
from paceline.engines.virtual.allreduce_timing import TimedAllReduce
from paceline.engines.virtual.compressed_transfers import transfers_of
from paceline.engines.virtual.simulated_sums import SimulatedSums
from paceline.protocols.allreduce import AllReduceConfig
from paceline.tensors.flat_buffers import FlatBuffers
from paceline.utils.state_dict import Stateful
from paceline.utils.user_code import at_place
from paceline.worker.allreduce.base import AllReduceAlgorithm, Contribution
from paceline.worker.allreduce.vectors import add_payload, drop_counts
from paceline.worker.replica import Replica


class SimulatedAverage(Stateful, Parameters):
    """Parameters of a simulation without a server, each gradient computed at the weights of its worker.

    Args:
        timed: simulated workers.
        allreduce: payload and schedule of the sums.
        replica: replica that computes all gradients and evaluations.
        workers: algorithm of each worker; the same object for all where their weights never differ.
        wire: format on the network, as in `Torchrun`.

    Attributes:
        sums: sums of the payloads, with a state of their own.
    """

    _saved = ("work", "_expected", "_contributed", "_accepted")
    _parts = ("transfers", "workers")
    _defaults: ClassVar[Mapping[str, Any]] = {"_accepted": set()}

    def __init__(
        self,
        timed: TimedAllReduce,
        allreduce: AllReduceConfig,
        replica: Replica,
        workers: Sequence[AllReduceAlgorithm],
        wire: str,
    ) -> None:
        self._timed = timed
        self._allreduce = allreduce
        self._replica = replica
        self._algorithms = workers
        self._workers = list({id(worker): worker for worker in workers}.values())  # that differ
        self._batch_size = replica.batch_size
        self._transfers = transfers_of(parse_wire(wire), replica.layout)
        self.sums = SimulatedSums(self._allocate)
        self._work: dict[int, Compute] = {}
        self._contributed: set[int] = set()  # to the open update
        self._accepted: set[int] = set()  # of these
        self._expected: Apply | None = None

    @property
    def not_finite(self) -> str:
        """Nothing: a gradient that is not finite is not summed."""
        return ""

    def resume_at(self, version: int) -> None:
        """Begin with the parameters of the first worker's server as this version."""
        for worker in self._workers:
            if worker is not self._workers[0]:
                worker.server.load_state_dict(self._workers[0].server.state_dict())
            worker.reset_to_average()

    def begin(self) -> None:
        """Do nothing: every worker has the parameters."""

    def assigned(self, command: Compute) -> None:
        """Store the task; a worker that has joined again continues from the average."""
        if command.worker in self._timed.lost:
            self._algorithms[command.worker].reset_to_average()
        self._work[command.worker] = command

    def cancelled(self, command: Interrupt) -> None:
        """Do nothing: gradients are computed when they arrive."""

    def lost(self, worker: int) -> None:
        """Do nothing, as `cancelled`."""

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return an arrival with its gradient, which is contributed to the sum of its iteration."""
        if self._timed.is_first:  # before the coordinator has handled a gradient of the iteration
            self._expected = coordinator.expected_update()
        worker, algorithm = arrival.worker, self._algorithms[arrival.worker]
        work = self._work.pop(worker)
        self._contributed.add(worker)
        with at_place(f"after update {work.version}"):
            measured = self._replica.gradient(worker, work.draw, work.minibatch, algorithm.weights, algorithm.gradient)
        assert self._expected is not None
        contribution = Contribution(finite=False)
        if measured.finite and arrival.measured.finite:
            contribution = algorithm.contribute(measured.squared_norm, self._share(measured.samples), self._expected)
            drop_counts(algorithm.payload, worker)
        else:
            algorithm.skip()
        measured = measured._replace(finite=contribution.finite, compute_s=arrival.measured.compute_s)
        return arrival._replace(measured=measured, compensations=contribution.compensations)

    def accept(self, command: Accept) -> None:
        """Add the payload of the worker."""
        self._add(command.worker, self._share(command.samples))
        self._accepted.add(command.worker)

    def apply(self, command: Apply) -> Step | None:
        """Apply the sum in every worker."""
        for worker in [worker for number, worker in enumerate(self._algorithms) if number not in self._contributed]:
            worker.skip()
        self._contributed.clear()
        if self._transfers is not None:
            for number in sorted(set(range(len(self._algorithms))) - self._accepted):
                self._algorithms[number].payload.memory.zero_()
                self._add(number, share=0.0)  # what its messages have left out
        self._accepted.clear()
        for worker in self._workers:
            worker.advance(command)
        if self._allreduce.separates_steps:
            step = self._apply_awaited_sums(command)
        else:
            fragment = self._allreduce.summed_fragment(self._timed.iteration)
            step = self._apply_sum(self.sums.total, self.sums.shares, command, fragment)
        self.sums.shares = 0.0
        return step

    def evaluation(self, version: int) -> dict[str, float]:
        """Return the metrics of the average, or of the mean of the workers' weights where they differ."""
        first = self._workers[0]
        with first.keeping_average():
            self._take_mean_of_weights()
            return self._replica.evaluate(first.average)

    def gather(self) -> None:
        """Do nothing: the first worker has the average."""

    def accumulate(self) -> None:
        """Do nothing: payloads are added when they are accepted."""

    def check(self, now: float) -> None:
        """Do nothing: only real runs are debugged."""

    def close(self) -> None:
        """End the background processes of the replica; the trained parameters are the mean of the workers' weights."""
        self._replica.close()
        self._take_mean_of_weights()

    def _add(self, worker: int, share: float) -> None:
        """Add the payload of a worker, as the others receive it."""
        payload = self._algorithms[worker].payload
        fragment = self._allreduce.summed_fragment(self._timed.iteration)
        if self._transfers is not None and fragment is not None:
            self._transfers.send(worker, payload, fragment)
            payload.receive(payload.missing)
        self.sums.add(payload, share)

    def _apply_sum(self, total: FlatBuffers, shares: float, command: Apply, fragment: int | None) -> Step | None:
        steps = [worker.apply_sum(total, shares, command, fragment) for worker in self._workers]
        return steps[0]

    def _apply_awaited_sums(self, command: Apply) -> Step | None:
        """Begin the sum of this iteration, and apply those for which the iteration has waited; return the last step."""
        fragment = self._allreduce.summed_fragment(self._timed.iteration)
        if fragment is not None:
            for worker in self._workers:
                worker.begin_sum(fragment)
            self.sums.begin(self._timed.iteration)
        step: Step | None = None
        begun = self._allreduce.awaited_sum(self._timed.iteration)
        for iteration, total, shares in self.sums.ended(begun or 0):
            fragment = self._allreduce.summed_fragment(iteration)
            assert fragment is not None
            step = self._apply_sum(total.shards[fragment], shares, command, fragment) or step
        return step

    def _take_mean_of_weights(self) -> None:
        """Move the average of the first worker to the mean of the workers' weights, where it does not follow them."""
        if self._allreduce.separates_steps and self._expected is not None:
            total = self._allocate()
            for number, worker in enumerate(self._algorithms):
                worker.collect_steps(number)
                add_payload(total, worker.payload, is_first=number == 0)
            if shares := sum(worker.share for worker in self._algorithms):
                self._workers[0].apply_sum(total, shares, self._expected, fragment=None)

    def _allocate(self) -> FlatBuffers:
        return self._replica.layout.allocate(self._workers[0].server.device)

    def _share(self, samples: int) -> float:
        return samples / self._batch_size


def simulated_allreduce(
    cluster: Cluster, seed: int, allreduce: AllReduceConfig, replica: Replica, workers: Sequence[AllReduceAlgorithm]
) -> RunLoop:
    """Return the loop of a simulation without a server and with real gradients.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        allreduce: payload and schedule of the sums.
        replica: replica that computes all gradients and evaluations.
        workers: algorithm of each worker, as for `SimulatedAverage`.
    """
    timed = TimedAllReduce(cluster, seed, allreduce, payload_bytes=replica.layout.gradient_nbytes)
    parameters = SimulatedAverage(timed, allreduce, replica, workers, cluster.network.wire)
    timed.evaluation = parameters.evaluation
    return RunLoop(timed, parameters, timed, simulated=[timed, parameters, parameters.sums])
