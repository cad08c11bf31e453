"""Parameters of one rank, which it steps with sums of the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.events import Apply, Step
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.announced_sums.early_sum import EarlySum
from paceline.engines.distributed.transport.announced_messages import SummedGradient
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, is_a_mean
from paceline.tensors.kernels import await_kernels


class Held(NamedTuple):
    """Gradients of one sum that a rank has added up.

    Attributes:
        total: sum(s_j g_j).
        gradients: the gradients in it.
    """

    total: FlatBuffers
    gradients: set[SummedGradient]


class RankParameters:
    """Parameters of one rank, and its gradients of the update in progress.

    Gradients g_1 ... g_k of s_1 ... s_k samples have the mean sum(s_j g_j) / sum(s_j). Each rank adds up its own terms,
    the ranks sum those, and each rank steps with the same mean, so all have the same bits. Floating-point buffers move
    by the mean of their changes; whole numbers and booleans are those of the gradient of the lowest worker.

    A version is not changed while the worker computes at it: then the next one is made in other memory. What this rank
    has of a sum stays until the sum is complete, so a sum that has failed can begin anew.

    Args:
        server: parameters and optimizer of this rank.
        layout: layout of the model.
        worker: number of the worker of this rank.
        keeps_memory: whether the memory of gradients and sums stays for the next ones. Else none is taken while the
            worker computes, which costs allocations; the worker claims that of its gradient.

    Attributes:
        number: number of the version that this rank has; -1 before the first one.
        gradient: memory for the newest gradient of the worker.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout, worker: int, *, keeps_memory: bool = True) -> None:
        self.number = -1
        self.gradient = layout.allocate(server.device)
        self._total: FlatBuffers | None = None
        self._server = server
        self._layout = layout
        self._worker = worker
        self._keeps_memory = keeps_memory
        self._newest: SummedGradient | None = None  # in `gradient`, not in a sum yet
        self._held: dict[int, Held] = {}  # earlier gradients, by the number of their sum
        self._spare: list[FlatBuffers] = []  # memory for those of later sums
        self._early: EarlySum | None = None  # of the newest gradient
        self._recomputed: FlatBuffers | None = None  # memory for the gradients of lost workers
        self._read: FlatBuffers | None = None  # version at which the worker computes
        self._other: FlatBuffers | None = None  # memory of the next version while this one is read

    @property
    def not_finite(self) -> str:
        """Why the parameters are not finite; empty while they are."""
        return self._server.not_finite

    @property
    def version(self) -> FlatBuffers:
        """Version that this rank has."""
        return self._server.state

    @property
    def total(self) -> FlatBuffers:
        """Memory of this rank's terms of a sum, and then of the sum."""
        self._total = self._total or self._allocate()
        return self._total

    @property
    def recomputed(self) -> FlatBuffers:
        """Memory for the gradient of a lost worker, which `hold_recomputed` keeps."""
        self._recomputed = self._recomputed or self._allocate()
        return self._recomputed

    def begin(self, number: int, state: Mapping[str, Any] | None) -> None:
        """Begin with a version.

        Args:
            number: its number.
            state: state of a server that has it; None if this rank has it.
        """
        self.number = number
        if state is not None:
            self._server.load_state_dict(state)

    def disconnect(self) -> None:
        """Keep the version alone: without the coordinator nothing else counts, and no task is under way."""
        self.drop_gradients(max(self._held, default=0))
        self._server.drop_gradients()
        self.renew_total()
        self._early = None
        self._read = None

    def begin_task(self, *, keeps_for: int | None) -> FlatBuffers:
        """Return the version at which the next gradient is computed, which overwrites the newest one.

        Args:
            keeps_for: number of the sum in which that one counts if no sum has had it yet; None if it was not accepted.
        """
        if keeps_for is not None and self._newest is not None:
            self._complete()
            self._hold(keeps_for, self._newest, self.gradient)
        self._newest = None
        if not self._keeps_memory:
            self.gradient.release()
        self._read = self._server.state
        await_kernels(self._server.device)  # a loop may read the version in another stream
        return self._read

    def begin_early(self, group: ElasticGroup | None) -> None:
        """Let a group sum the gradient of the next task while it is computed; None for no early sum."""
        if group is not None or self._early is not None:
            self._early = self._early or EarlySum(self._layout, self.gradient)
            self._early.begin(group)

    def on_accumulated(self, parameter: int, gradient: Tensor | None = None) -> Tensor | None:
        """Note that the gradient of a parameter is complete; return its squared norm if it is summed where it is."""
        if self._early is None:
            return None
        if gradient is not None:
            return self._early.take(parameter, gradient)
        self._early.on_accumulated(parameter)
        return None

    def end_task(self, draw: int, weight: float) -> bool:
        """Note that the gradient of a task is complete; return whether its sum has begun."""
        self.gradient.claim()  # of a worker that has written none
        self._newest = SummedGradient(self._worker, draw, weight, at=self._worker)
        self._read = None
        return self._early is not None and self._early.end()

    def cancel_task(self) -> None:
        """Note that a task has ended without a gradient."""
        if self._server.device.type == "cuda":
            torch.cuda.synchronize(self._server.device)  # in any stream: it still reads the version
        self.gradient.claim()
        self._read = None
        if self._early is not None:
            self._early.end()

    def await_early(self) -> None:
        """Wait for the early sum of the newest gradient.

        Raises:
            ConnectionLost: a member of its group has left.
        """
        assert self._early is not None
        self._early.wait()

    def hold_recomputed(self, number: int, worker: int, draw: int, weight: float) -> None:
        """Keep the gradient of a lost worker, which counts in the sum of this number."""
        self._hold(number, SummedGradient(worker, draw, weight, at=self._worker), self.recomputed)

    def write_terms(self, number: int, gradients: Sequence[SummedGradient]) -> None:
        """Write this rank's terms of a sum to `total`: zeros if it has none.

        Args:
            number: number of the sum.
            gradients: gradients that count, of all ranks; one or more.
        """
        whole = sum(each.weight for each in gradients)
        own = {each for each in gradients if each.at == self._worker}
        terms: list[tuple[FlatBuffers, float]] = []
        held = self._held.get(number)
        if held is not None:
            terms.append((held.total, 1 / whole))
        newest = {self._newest} & own if self._newest is not None else set()
        if newest:
            self._complete()
        terms += [(self.gradient, each.weight / whole) for each in newest]
        has = newest if held is None else held.gradients | newest
        assert own == has, "each gradient that counts is at its rank, and what a rank holds counts"
        is_first = min(gradients).at == self._worker
        self._write([each for each, _ in terms], [weight for _, weight in terms], is_first=is_first)

    def drop_terms(self, number: int, gradients: Sequence[SummedGradient]) -> None:
        """Note that the sums up to a number, the last one of these gradients, have this rank's terms."""
        for each in [each for each in self._held if each <= number]:
            self._spare.append(self._held.pop(each).total)
        if self._newest in gradients:
            self._newest = None

    def drop_gradients(self, number: int) -> None:
        """Drop what this rank has for the sums up to a number: it does not count any more."""
        self.drop_terms(number, ())
        self._newest = None

    def renew_total(self) -> None:
        """Take other memory for sums: a group that has failed may still write to this one."""
        self._total = None

    def add_sum(
        self, number: int, gradients: Sequence[SummedGradient], missing: Container[int], *, is_early: bool = False
    ) -> None:
        """Add a sum to the mean of the update in progress, and drop the terms of this rank.

        Args:
            number: number of the sum.
            gradients: gradients in it.
            missing: indices of the model's parameters that have no gradient in any of them.
            is_early: whether it is the early sum of the newest gradient; else it is in `total`.
        """
        total = self._early.total if is_early and self._early is not None else self.total
        total.receive(missing)
        whole = sum(each.weight for each in gradients)
        self._server.enqueue(total, whole, worker=min(gradients).worker)
        self.drop_terms(number, gradients)

    def keep_sum(self) -> None:
        """Keep the mean so far for an update that is still to come."""
        self._server.flush()

    def apply(self, update: Apply) -> Step | None:
        """Make the update, and return its step if that is measured."""
        self.number = update.version
        step = self._server.apply(update, self._unread() if self._read is self._server.state else None)
        if not self._keeps_memory:
            self._server.model.zero_grad()  # an optimizer that has stepped itself had views of the sum
            self.renew_total()
            if self._early is not None:
                self._early.renew()
        return step

    def take_state(self, number: int, state: Mapping[str, Any]) -> None:
        """Continue with the version of this number that another rank's server has."""
        self.number = number
        if self._read is self._server.state:
            self._server.publish(self._unread())
        self._server.load_state_dict(state)

    def _complete(self) -> None:
        """Write what only an early sum has of the newest gradient to its memory."""
        if self._early is not None:
            self._early.complete_gradient()

    def _allocate(self) -> FlatBuffers:
        return self._layout.allocate(self._server.device)

    def _unread(self) -> FlatBuffers:
        """Return memory for the next version, which follows the one that is read."""
        new = self._other or self._allocate()
        self._other = self._server.state
        return new

    def _hold(self, number: int, key: SummedGradient, gradient: FlatBuffers) -> None:
        """Add a gradient to those that are held for a sum, times its weight."""
        is_first = number not in self._held
        if is_first:
            self._held[number] = Held(self._spare.pop() if self._spare else self._allocate(), set())
        held = self._held[number]
        for total, each in zip(_means(held.total), _means(gradient), strict=True):
            if is_first:
                torch.mul(each, key.weight, out=total)
            else:
                total.add_(each, alpha=key.weight)
        for total, each in zip(_numbers(held.total), _numbers(gradient), strict=True):
            total.copy_(each)
        held.gradients.add(key)

    def _write(self, terms: Sequence[FlatBuffers], weights: Sequence[float], *, is_first: bool) -> None:
        if not terms:
            self.total.memory.zero_()
            return
        for total, *vectors in zip(*map(_means, [self.total, *terms]), strict=True):
            torch.mul(vectors[0], weights[0], out=total)
            for vector, weight in zip(vectors[1:], weights[1:], strict=True):
                total.add_(vector, alpha=weight)
        for total, newest in zip(_numbers(self.total), _numbers(terms[-1]), strict=True):
            if is_first:
                total.copy_(newest)
            else:
                total.zero_()


def _means(flat: FlatBuffers) -> list[Tensor]:
    """Return the vectors of which ranks take the mean."""
    return [*flat.flat_parameters, *filter(is_a_mean, flat.flat_buffers)]


def _numbers(flat: FlatBuffers) -> list[Tensor]:
    """Return the vectors of whole numbers and booleans."""
    return [each for each in flat.flat_buffers if not is_a_mean(each)]
