"""All-reduce algorithms of a worker without a server, independent of how payloads are communicated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from paceline.core.events import Apply, Compensation, Step
from paceline.policies.compensation.base import BLOCK
from paceline.protocols.allreduce import AllReduceConfig
from paceline.server.flat_buffers import FlatBuffers, FlatLayout, copy_checked
from paceline.server.parameter_server import ParameterServer
from paceline.utils.state_dict import Stateful
from paceline.worker.own_steps import OwnSteps, Sign, add_vectors, pairs


class Contribution(NamedTuple):
    """Outcome of a worker's contribution to a sum.

    Attributes:
        finite: whether the gradient is finite; if not, the payload is zero and its share is 0.
        compensations: compensations applied to the gradient.
    """

    finite: bool
    compensations: tuple[Compensation, ...] = ()


class AllReduceAlgorithm(Stateful, ABC):
    """Optimizer and parameters of a worker; communication is left to the engine.

    In every iteration a gradient is computed at `weights` into `gradient`, then `contribute` writes `payload`. Payloads
    and shares are summed over the workers, which call `begin_sum`; `apply_sum` then moves every worker's `average` by
    the same amount. Sums end in the order in which they began. Every worker calls `advance` for every update, with or
    without a contribution of its own: all are at the same workload.

    Args:
        server: optimizer, schedule and clipping of this worker; its state is the average.
        layout: layout of the model.

    Attributes:
        share: share of the newest contribution, 0 if it is zero.
    """

    _parts = ("server",)

    def __init__(self, server: ParameterServer, layout: FlatLayout) -> None:
        self.server = server
        self.gradient = layout.allocate(server.device)
        self.share = 0.0

    @property
    def average(self) -> FlatBuffers:
        """Parameters and buffers that all workers have in common."""
        return self.server.state

    @property
    @abstractmethod
    def weights(self) -> FlatBuffers:
        """Weights at which the next gradient is computed."""

    @property
    @abstractmethod
    def payload(self) -> FlatBuffers:
        """Buffers that are summed over the workers: numbers are added, booleans combined by `or`."""

    @abstractmethod
    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Write the payload of the gradient.

        Args:
            squared_norm: squared norm of the gradient, finite.
            share: samples of the gradient over the batch size, > 0; the weight of the payload.
            update: next update, if all workers contribute.
        """

    @abstractmethod
    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, *, adopts: bool) -> Step | None:
        """Move the average by the sum of the payloads; return the measured step, if there is one.

        Args:
            total: sum of the payloads; may be changed.
            shares: sum of the shares, > 0.
            update: update of this sum.
            adopts: whether this worker continues from the average.
        """

    @abstractmethod
    def advance(self, update: Apply) -> None:
        """Advance the schedule by an update, before `apply_sum` if there is a sum."""

    def skip(self) -> None:
        """Contribute zeros; steps of this worker since the last sum are lost."""
        self.payload.memory.zero_()

    def begin_sum(self) -> None:
        """Record that a sum of the payloads has begun."""

    def collect_steps(self) -> None:
        """Write the steps of this worker that no completed sum contains into the payload, times the share.

        The average plus the mean of these payloads is the mean of the workers' weights.
        """

    @contextmanager
    def keeping_average(self) -> Iterator[None]:
        """Return a block in which the average may move to the mean of the workers' weights, for an evaluation."""
        yield

    @abstractmethod
    def reset_to_average(self) -> None:
        """Set the weights of this worker to the average."""

    def restore_from(self, state: Mapping[str, Any], *, keeps_state: bool) -> None:
        """Continue from the average of another worker.

        Args:
            state: state of that worker's server.
            keeps_state: whether this worker has contributed before, and keeps the optimizer state that is its own.
        """
        self.server.load_state_dict(state)
        self.reset_to_average()


class GradientAveraging(AllReduceAlgorithm):
    """Gradient averaging: all workers step with the mean of their gradients; weights and average are the same."""

    @property
    def weights(self) -> FlatBuffers:
        """Average."""
        return self.average

    @property
    def payload(self) -> FlatBuffers:
        """Gradient."""
        return self.gradient

    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Multiply the gradient by its share."""
        _scale(self.gradient, share)
        return Contribution(finite=True)

    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, *, adopts: bool) -> Step | None:
        """Make the same step as all other workers."""
        _scale(total, 1 / shares)
        total.written.update(range(len(total.parameters)))  # other workers may have gradients where this one has none
        self.server.enqueue(total, samples=1)
        return self.server.apply(update)

    def advance(self, update: Apply) -> None:
        """Do nothing: `apply_sum` advances the schedule."""

    def reset_to_average(self) -> None:
        """Do nothing: the weights are the average."""


class UpdateAveraging(AllReduceAlgorithm):
    """Update averaging: each worker steps its own weights, and the steps are averaged.

    With w the average, w_i the weights and U the step of the optimizer,

        D_i = w + s_i - w_i,   g_i += lambda_i g_i g_i D_i,   delta_i = U(g_i) at w + s_i,   w_i = w + s_i + delta_i

    if sums overlap gradients, where s_i is the sum of the worker's own steps that w does not contain; otherwise
    delta_i = U(g_i) at w_i, w_i += delta_i. With a lag of one, s_i is zero and these are the equations of DC-S3GD; with
    a longer lag, D_i is the mean of the steps in the newest completed sum minus the worker's own, as in eq. (9). Any
    optimizer of torch can be used: delta_i is the difference that it makes, so weight decay is that of the weights it
    steps from, and each worker has its own momentum.

    A distance within rounding counts as zero: eq. (17) would turn it into a fifth of the gradient.

    An outer optimizer steps the average at the sums after which the workers continue from it; at other sums, which
    evaluations and the end of the run need, the average is the mean of the workers' parameters.

    Args:
        server: optimizer, schedule and clipping of this worker; its state is the average.
        layout: layout of the model.
        allreduce: how long sums overlap gradients, the correction, and the outer optimizer.

    Source: Rigazzi, "DC-S3GD", 2019, Algorithm 1, eq. (7) to (12), and Sect. V, which names a longer lag; Stich,
    "Local SGD", 2019; Douillard et al., "DiLoCo", 2023.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout, allreduce: AllReduceConfig) -> None:
        super().__init__(server, layout)
        self._overlaps = allreduce.overlaps
        self._outer = allreduce.outer
        self._corrections = (allreduce.correction,) if allreduce.correction else ()
        self._weights = layout.allocate(server.device)
        self._weights.copy_(server.state)
        self._payload = layout.allocate(server.device)
        self._counts = _integers(server.state)
        self._own = OwnSteps(layout, server.device) if allreduce.separates_steps else None

    @property
    def weights(self) -> FlatBuffers:
        """Weights of this worker."""
        return self._weights

    @property
    def payload(self) -> FlatBuffers:
        """Steps of this worker since the last sum."""
        return self._payload

    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Correct the gradient, and step the weights of this worker."""
        compensations: tuple[Compensation, ...] = ()
        finite = True
        if self._corrections:
            self._add_own_steps(-1)
            if self._is_apart():
                compensations, finite = self.server.compensate(
                    self._corrections, self.gradient, self._weights, 1, squared_norm
                )
        if finite:
            self.share = share
            self._step(update)
            self._write_payload(share)
        else:
            self.skip()
        return Contribution(finite, compensations)

    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, *, adopts: bool) -> Step | None:
        """Move the average by the mean of the steps, or step the outer optimizer with it; no step is measured."""
        if self._outer is not None:
            self._outer.begin(self.average.flat_parameters, self.server.memory(self._outer))
        for average, step in pairs(self.average, total):
            if average.dtype == torch.bool:
                average.logical_or_(step)
            elif _is_a_mean(average):
                average.add_(step, alpha=1 / shares)
            else:
                average.add_(step)
        if adopts and self._outer is not None:
            self._outer.step(self.average.flat_parameters, self.server.memory(self._outer))
        if adopts and self._own is not None:
            self._own.end_sum()
        if adopts and not self._overlaps:  # else its next gradient is under way
            self.reset_to_average()
        return None

    def advance(self, update: Apply) -> None:
        """Advance the schedule: the step of a single worker does not."""
        self.server.scheduler.advance(update.workload)

    def skip(self) -> None:
        """Contribute zeros; continue from the average if sums overlap, else from the own weights until the next sum."""
        if self._overlaps:
            self._set_weights()
        self._restore_counts()
        self.share = 0.0
        super().skip()

    def begin_sum(self) -> None:
        """Record that the steps so far are in a sum."""
        if self._own is not None:
            self._own.begin_sum()

    def collect_steps(self) -> None:
        """Write the steps of this worker that no completed sum contains, where the payload has fewer."""
        if self._own is not None:
            self._own.write_total(self._payload)
            _scale(self._payload, self.share)

    @contextmanager
    def keeping_average(self) -> Iterator[None]:
        """Return a block after which the average is as before, if the workers continue from its sums alone."""
        average = self.average.memory
        kept = average.clone() if self._own is not None else None
        yield
        if kept is not None:
            average.copy_(kept)

    def reset_to_average(self) -> None:
        """Set the weights of this worker to the average; forget its own steps."""
        if self._own is not None:
            self._own.forget()
        self._set_weights()

    def restore_from(self, state: Mapping[str, Any], *, keeps_state: bool) -> None:
        """Continue from another worker's average, with the own momentum if this worker has contributed before.

        The momentum of one worker is not the mean over workers, which is less noisy. No sum is under way any more.
        """
        if keeps_state:
            own = self.server.optimizer.state_dict()["state"]
            state = {**state, "optimizer": {**state["optimizer"], "state": own}}
        if self._own is not None:
            self._own.clear()
        super().restore_from(state, keeps_state=keeps_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the weights of this worker."""
        own = self._own.state() if self._own is not None else []
        weights = self._weights.memory.clone()
        return {**super().state_dict(), "weights": weights, "counts": self._counts, "own": own, "share": self.share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        copy_checked(self._weights.memory, state["weights"])
        self._counts = list(state["counts"])
        if self._own is not None:
            self._own.load(state["own"])
        self.share = state.get("share", 0.0)  # checkpoints of version 0.1 have none

    def _set_weights(self) -> None:
        """Set the weights to the average with the worker's own steps."""
        self._weights.copy_(self.average)
        self._counts = _integers(self.average)
        self._add_own_steps(1)

    def _add_own_steps(self, sign: Sign) -> None:
        if self._own is not None:
            self._own.add_to(self._weights, sign)

    def _step(self, update: Apply) -> None:
        average = self.average
        if self._overlaps:
            self._set_weights()
        self.server.rebind_storage(self._weights)
        self.server.enqueue(self.gradient, samples=1)
        self.server.step(update)
        self.server.rebind_storage(average)

    def _write_payload(self, share: float) -> None:
        self._restore_counts()
        for step, weights, average in pairs(self._payload, self._weights, self.average):
            if step.dtype == torch.bool:
                step.copy_(weights)
            else:
                torch.sub(weights, average, out=step)
        if self._own is not None:
            self._own.take_newest(self._payload)
        _scale(self._payload, share)

    def _restore_counts(self) -> None:
        """Undo changes of integer buffers since the last sum: the next sum contains them."""
        for flat, counted in zip(_integer_buffers(self.average), self._counts, strict=True):
            flat.copy_(counted)

    def _is_apart(self) -> bool:
        return any(map(_are_apart, self.average.flat_parameters, self._weights.flat_parameters))


def make_algorithm(allreduce: AllReduceConfig, server: ParameterServer, layout: FlatLayout) -> AllReduceAlgorithm:
    """Return the algorithm of an all-reduce configuration."""
    if allreduce.sums == "gradients":
        return GradientAveraging(server, layout)
    return UpdateAveraging(server, layout, allreduce)


def add_payload(total: FlatBuffers, payload: FlatBuffers, *, is_first: bool) -> None:
    """Add a payload to the sum, or begin the sum with it."""
    if is_first:
        total.copy_(payload)
        return
    add_vectors(total, payload)


def _are_apart(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two vectors differ by more than rounding in some block; the first block mostly decides."""
    eps = torch.finfo(first.dtype).eps
    return any(_norm(a.sub(b)) > eps * _norm(a) for a, b in zip(first.split(BLOCK), second.split(BLOCK), strict=True))


def _norm(block: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(block))


def _integer_buffers(vectors: FlatBuffers) -> list[torch.Tensor]:
    return [flat for flat in vectors.flat_buffers if not _is_a_mean(flat) and flat.dtype != torch.bool]


def _integers(vectors: FlatBuffers) -> list[torch.Tensor]:
    return [flat.clone() for flat in _integer_buffers(vectors)]


def _is_a_mean(flat: torch.Tensor) -> bool:
    return flat.is_floating_point() or flat.is_complex()


def _scale(vectors: FlatBuffers, factor: float) -> None:
    """Multiply all means; integer and boolean buffers stay."""
    if factor == 1.0:
        return
    for flat in [*vectors.flat_parameters, *vectors.flat_buffers]:
        if _is_a_mean(flat):
            flat.mul_(factor)
