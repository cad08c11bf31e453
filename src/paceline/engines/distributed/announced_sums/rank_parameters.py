"""Parameters of one rank, which it steps with sums of the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from paceline.core.events import Apply, Step
from paceline.engines.distributed.transport.sum_messages import SummedGradient
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, is_a_mean


class RankParameters:
    """Parameters of one rank, and its gradients of the update in progress.

    Gradients g_1 ... g_k of s_1 ... s_k samples have the mean sum(s_j g_j) / sum(s_j). Each rank adds up its own terms,
    the ranks sum those, and each rank steps with the same mean, so all have the same bits. Floating-point buffers move
    by the mean of their changes; whole numbers and booleans are those of the gradient of the lowest worker.

    A version is not changed while the worker computes at it: then the next one is made in other memory.

    Args:
        server: parameters and optimizer of this rank.
        layout: layout of the model.
        worker: number of the worker of this rank.

    Attributes:
        gradient: memory for the newest gradient of the worker.
        total: this rank's terms of a sum, and then the sum.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout, worker: int) -> None:
        self.gradient = layout.allocate()
        self.total = layout.allocate()
        self._server = server
        self._layout = layout
        self._worker = worker
        self._newest: SummedGradient | None = None  # in `gradient`, not in a sum yet
        self._held: FlatBuffers | None = None  # sum(s_j g_j) of earlier gradients of the update in progress
        self._draws: set[int] = set()  # of these
        self._read: FlatBuffers | None = None  # version at which the worker computes
        self._other: FlatBuffers | None = None  # memory of the next version while this one is read

    @property
    def not_finite(self) -> str:
        """Why the parameters are not finite; empty while they are."""
        return self._server.not_finite

    def begin_task(self, *, keeps: bool) -> FlatBuffers:
        """Return the version at which the next gradient is computed, which overwrites the newest one.

        Args:
            keeps: whether that one was accepted, so that it counts if no sum has had it yet.
        """
        if keeps and self._newest is not None:
            self._hold(self._newest)
        self._newest = None
        self._read = self._server.state
        return self._read

    def end_task(self, draw: int, samples: int) -> None:
        """Note that the gradient of a task is complete."""
        self._newest = SummedGradient(self._worker, draw, samples)
        self._read = None

    def cancel_task(self) -> None:
        """Note that a task has ended without a gradient."""
        self._read = None

    def write_terms(self, gradients: Sequence[SummedGradient]) -> None:
        """Write this rank's terms of a sum to `total`: zeros if it has none.

        Args:
            gradients: gradients that count, of all ranks; one or more.
        """
        samples = sum(each.samples for each in gradients)
        own = {each.draw for each in gradients if each.worker == self._worker}
        terms: list[tuple[FlatBuffers, float]] = []
        if self._held is not None and self._draws:
            assert own >= self._draws, "what was accepted counts in the next sum"
            terms.append((self._held, 1 / samples))
        if self._newest is not None and self._newest.draw in own:
            terms.append((self.gradient, self._newest.samples / samples))
            self._draws.add(self._newest.draw)
            self._newest = None
        assert own == self._draws, "each gradient that counts is at its rank"
        self._draws = set()
        is_first = self._worker == min(each.worker for each in gradients)
        self._write([each for each, _ in terms], [weight for _, weight in terms], is_first=is_first)

    def add_sum(self, gradients: Sequence[SummedGradient], missing: Container[int]) -> None:
        """Add the sum in `total` to the mean of the update in progress.

        Args:
            gradients: gradients in it.
            missing: indices of the model's parameters that have no gradient in any of them.
        """
        self.total.receive(missing)
        samples, first = sum(each.samples for each in gradients), min(each.worker for each in gradients)
        self._server.enqueue(self.total, samples, worker=first)

    def keep_sum(self) -> None:
        """Keep the mean so far for an update that is still to come."""
        self._server.flush()

    def apply(self, update: Apply) -> Step | None:
        """Make the update, and return its step if that is measured."""
        if self._read is not self._server.state:
            return self._server.apply(update)
        new = self._other or self._layout.allocate()
        self._other = self._server.state
        return self._server.apply(update, new)

    def _hold(self, newest: SummedGradient) -> None:
        """Add the newest gradient to those that are held, times its samples."""
        held = self._held = self._held or self._layout.allocate()
        is_first = not self._draws
        for total, each in zip(_means(held), _means(self.gradient), strict=True):
            if is_first:
                torch.mul(each, newest.samples, out=total)
            else:
                total.add_(each, alpha=newest.samples)
        for total, each in zip(_numbers(held), _numbers(self.gradient), strict=True):
            total.copy_(each)
        self._draws.add(newest.draw)

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


def _means(flat: FlatBuffers) -> list[torch.Tensor]:
    """Return the vectors of which ranks take the mean."""
    return [*flat.flat_parameters, *filter(is_a_mean, flat.flat_buffers)]


def _numbers(flat: FlatBuffers) -> list[torch.Tensor]:
    """Return the vectors of whole numbers and booleans."""
    return [each for each in flat.flat_buffers if not is_a_mean(each)]
