"""All-reduce engine in virtual time, with real gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.clusters.simulated import Cluster
from paceline.core.events import Accept, Apply, Arrival, Compute, Evaluate, Evaluated
from paceline.core.wire import parse_wire
from paceline.engines.virtual.allreduce_timing import AllReduceTiming
from paceline.engines.virtual.compressed_transfers import transfers_of
from paceline.protocols.allreduce import AllReduceConfig
from paceline.tensors.flat_buffers import FlatBuffers, copy_checked
from paceline.utils.user_code import at_place
from paceline.worker.allreduce.base import AllReduceAlgorithm, Contribution
from paceline.worker.allreduce.vectors import add_payload, drop_counts
from paceline.worker.replica import Replica


class _Sum(NamedTuple):
    """Sum of the payloads and of the shares of an iteration."""

    iteration: int
    total: FlatBuffers
    shares: float


class VirtualAllReduce(AllReduceTiming):
    """Simulated all-reduce with real gradients, each computed at the weights of its worker.

    Args:
        cluster: workers and their times.
        seed: seed of the run, >= 0.
        allreduce: payload and schedule of the sums.
        replica: replica that computes all gradients and evaluations.
        workers: algorithm of each worker; the same object for all where their weights never differ.
    """

    _saved = (*AllReduceTiming._saved, "work", "_shares", "_expected", "_contributed", "_accepted")
    _parts = ("transfers",)

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        allreduce: AllReduceConfig,
        replica: Replica,
        workers: Sequence[AllReduceAlgorithm],
    ) -> None:
        super().__init__(cluster, seed, allreduce, payload_bytes=replica.layout.gradient_nbytes)
        self._replica = replica
        self._workers = workers
        self._distinct = list({id(worker): worker for worker in workers}.values())
        self._batch_size = replica.batch_size
        self._transfers = transfers_of(parse_wire(cluster.network.wire), replica.layout)
        self._total = self._new_total()
        self._shares = 0.0
        self._sums: deque[_Sum] = deque()  # that are under way
        self._work: dict[int, Compute] = {}
        self._contributed: set[int] = set()  # to the open update
        self._accepted: set[int] = set()  # of these
        self._expected: Apply | None = None

    def _close(self, error: BaseException | None) -> None:
        """End the background processes of the replica; the trained parameters are the mean of the workers' weights."""
        self._replica.close()
        self._take_mean_of_weights()

    def compute(self, command: Compute) -> None:
        """Store the task; a worker that has joined again continues from the average."""
        if command.worker in self._lost:
            self._lost.remove(command.worker)
            self._workers[command.worker].reset_to_average()
        self._work[command.worker] = command
        super().compute(command)

    def accept(self, command: Accept) -> None:
        """Add the payload of the worker."""
        super().accept(command)
        self._add(command.worker, is_first=not self._shares)
        self._accepted.add(command.worker)
        self._shares += self._share(command.samples)

    def apply(self, command: Apply) -> None:
        """Apply the sum in every worker."""
        super().apply(command)
        for worker in [worker for number, worker in enumerate(self._workers) if number not in self._contributed]:
            worker.skip()
        self._contributed.clear()
        if self._transfers is not None:
            for number in sorted(set(range(len(self._workers))) - self._accepted):
                self._workers[number].payload.memory.zero_()
                self._add(number, is_first=False)  # what its messages have left out
        self._accepted.clear()
        for worker in self._distinct:
            worker.advance(command)
        if self._allreduce.separates_steps:
            self._apply_awaited_sums(command)
        else:
            self._apply_sum(self._total, self._shares, command, self._allreduce.summed_fragment(self._iteration))
        self._shares = 0.0

    def evaluate(self, command: Evaluate) -> None:
        """Evaluate the average, or the mean of the workers' weights where they differ, in zero virtual time."""
        first = self._workers[0]
        with first.keeping_average():
            self._take_mean_of_weights()
            metrics = self._replica.evaluate(first.average)
        self._at(self.now, Evaluated(self.now, command.version, metrics))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with that of every worker and the open sum."""
        return {
            **super().state_dict(),
            "workers": [worker.state_dict() for worker in self._distinct],
            "total": self._total.memory.clone() if self._shares else None,
            "sums": [(iteration, total.memory.clone(), shares) for iteration, total, shares in self._sums],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state of the same cluster."""
        super().load_state_dict({"_accepted": set(), **state})  # missing in early runs
        for worker, saved in zip(self._distinct, state["workers"], strict=True):
            worker.load_state_dict(saved)
        if state["total"] is not None:
            copy_checked(self._total.memory, state["total"])
        for iteration, saved, shares in state.get("sums", ()):
            total = self._new_total()
            copy_checked(total.memory, saved)
            self._sums.append(_Sum(iteration, total, shares))

    def resume_at(self, version: int, now: float) -> None:
        """Start at this time, with the parameters of the first worker's server as this version."""
        super().resume_at(version, now)
        for worker in self._distinct:
            if worker is not self._workers[0]:
                worker.server.load_state_dict(self._workers[0].server.state_dict())
            worker.reset_to_average()

    def _add(self, worker: int, *, is_first: bool) -> None:
        """Add the payload of a worker, as the others receive it."""
        payload = self._workers[worker].payload
        fragment = self._allreduce.summed_fragment(self._iteration)
        if self._transfers is not None and fragment is not None:
            self._transfers.send(worker, payload, fragment)
            payload.receive(payload.missing)
        add_payload(self._total, payload, is_first=is_first)

    def _apply_sum(self, total: FlatBuffers, shares: float, command: Apply, fragment: int | None) -> None:
        steps = [worker.apply_sum(total, shares, command, fragment) for worker in self._distinct]
        self.report_step(command, steps[0])

    def _apply_awaited_sums(self, command: Apply) -> None:
        """Begin the sum of this iteration, and apply those for which the iteration has waited."""
        fragment = self._allreduce.summed_fragment(self._iteration)
        if fragment is not None:
            for worker in self._distinct:
                worker.begin_sum(fragment)
            self._sums.append(_Sum(self._iteration, self._total, self._shares))
            self._total = self._new_total()
        begun = self._allreduce.awaited_sum(self._iteration)
        while begun is not None and self._sums and self._sums[0].iteration <= begun:
            iteration, total, shares = self._sums.popleft()
            fragment = self._allreduce.summed_fragment(iteration)
            assert fragment is not None
            self._apply_sum(total.shards[fragment], shares, command, fragment)

    def _take_mean_of_weights(self) -> None:
        """Move the average of the first worker to the mean of the workers' weights, where it does not follow them."""
        if self._allreduce.separates_steps and self._expected is not None:
            total = self._new_total()
            for number, worker in enumerate(self._workers):
                worker.collect_steps(number)
                add_payload(total, worker.payload, is_first=number == 0)
            if shares := sum(worker.share for worker in self._workers):
                self._workers[0].apply_sum(total, shares, self._expected, fragment=None)

    def _new_total(self) -> FlatBuffers:
        return self._replica.layout.allocate(self._workers[0].server.device)

    def _end_iteration(self, ends_s: float) -> None:
        self._expected = self._coordinator.expected_update()
        super()._end_iteration(ends_s)

    def _arrival(self, worker: int, draw: int) -> Arrival:
        work, algorithm = self._work.pop(worker), self._workers[worker]
        self._contributed.add(worker)
        with at_place(f"after update {work.version}"):
            measured = self._replica.gradient(worker, draw, work.minibatch, algorithm.weights, algorithm.gradient)
        assert self._expected is not None
        contribution = Contribution(finite=False)
        if measured.finite and self._fault(worker) is None:
            contribution = algorithm.contribute(measured.squared_norm, self._share(measured.samples), self._expected)
            drop_counts(algorithm.payload, worker)
        else:
            algorithm.skip()
        stats = measured._asdict() | contribution._asdict()
        return super()._arrival(worker, draw)._replace(**stats)

    def _share(self, samples: int) -> float:
        return samples / self._batch_size
