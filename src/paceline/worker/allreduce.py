"""What a worker without a server does, whatever carries what it hands in to the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from paceline.core.events import Apply, Compensation, Step
from paceline.policies.compensation.base import BLOCK
from paceline.protocols.allreduce import AllReduceConfig
from paceline.server.flat_buffers import FlatBuffers, FlatLayout, copy_checked
from paceline.server.parameter_server import ParameterServer


class Contribution(NamedTuple):
    """What a worker says of what it has handed in.

    Attributes:
        finite: whether there is something; else zeros, and a share of 0.
        compensations: what was done to the gradient.
    """

    finite: bool
    compensations: tuple[Compensation, ...] = ()


class AllReduceAlgorithm(ABC):
    """A worker's optimizer and parameters, and nothing that communicates.

    In every iteration a gradient is computed at `weights` into `gradient`, then `contribute` writes `payload`. Payloads
    and shares are summed over the workers; `apply_sum` then moves every worker's `average` by the same amount. Every
    worker calls `advance` for every update, with or without a contribution of its own: all are at the same workload.

    Args:
        server: optimizer, schedule and clipping of this worker; its state is the average.
        layout: of the model.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout) -> None:
        self.server = server
        self.gradient = layout.allocate(server.device)

    @property
    def average(self) -> FlatBuffers:
        """Parameters and buffers that are the same at every worker."""
        return self.server.state

    @property
    @abstractmethod
    def weights(self) -> FlatBuffers:
        """Where the next gradient is to be computed."""

    @property
    @abstractmethod
    def payload(self) -> FlatBuffers:
        """What is summed over the workers: floats and integers added, booleans where any is true."""

    @abstractmethod
    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Make the payload of the gradient.

        Args:
            squared_norm: of the gradient, which is finite.
            share: the samples of its minibatch in whole minibatches, > 0; weights the payload.
            update: what the coming update will say, if everybody takes part.
        """

    @abstractmethod
    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, *, adopts: bool) -> Step | None:
        """Move the average by what all have handed in; return the step, if it is to be measured.

        Args:
            total: sum of the payloads; may be changed.
            shares: sum of the shares, > 0.
            update: that is made.
            adopts: whether this worker goes on from the average; else it only knows it.
        """

    @abstractmethod
    def advance(self, update: Apply) -> None:
        """Take note of an update that is made, before its sum is taken over, if there is one."""

    def skip(self) -> None:
        """Hand in nothing, and go on with the others; what this worker has not handed in before is lost."""
        self.payload.memory.zero_()

    @abstractmethod
    def reset_to_average(self) -> None:
        """Forget where this worker has gone by itself."""

    def restore_from(self, state: Mapping[str, Any], *, keeps_state: bool) -> None:
        """Go on from the average of another worker, whose server has this state.

        Args:
            state: of the server.
            keeps_state: whether this worker has taken part so far, and so has something to remember besides.
        """
        self.server.load_state_dict(state)
        self.reset_to_average()

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's optimizer and parameters."""
        return {"server": self.server.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self.server.load_state_dict(state["server"])


class GradientAveraging(AllReduceAlgorithm):
    """Steps with the mean of all gradients; the payload is the gradient, and the weights are the average."""

    @property
    def weights(self) -> FlatBuffers:
        """The average."""
        return self.average

    @property
    def payload(self) -> FlatBuffers:
        """The gradient."""
        return self.gradient

    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Weight the gradient."""
        _scale(self.gradient, share)
        return Contribution(finite=True)

    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, *, adopts: bool) -> Step | None:
        """Make the same step as everybody else."""
        _scale(total, 1 / shares)
        total.written.update(range(len(total.parameters)))  # by others, where this worker has not
        self.server.enqueue(total, samples=1)
        return self.server.apply(update)

    def advance(self, update: Apply) -> None:
        """Leave it to the step, which everybody makes."""

    def reset_to_average(self) -> None:
        """Stay there, as ever."""


class UpdateAveraging(AllReduceAlgorithm):
    """Steps for itself, and hands in by how much; what it then goes on from are its own weights, until it adopts.

    With w the average, w_i the weights and U the step of the optimizer,

        D_i = w - w_i,   g_i += lambda_i g_i g_i D_i,   delta_i = U(g_i) at w,   w_i = w + delta_i

    if sum and gradients overlap, and else delta_i = U(g_i) at w_i, w_i += delta_i. The optimizer is any of torch's:
    delta_i is the difference that it makes, so that weight decay is that of the weights it steps from, and momentum is
    each worker's own.

    A distance that is no more than rounding counts as none: eq. (17) would make it a fifth of the gradient.

    Args:
        reduction: whether sums overlap, and the correction.

    Source: Rigazzi, "DC-S3GD", 2019, Algorithm 1 and eq. (7) to (12); Stich, "Local SGD", 2019.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout, reduction: AllReduceConfig) -> None:
        super().__init__(server, layout)
        self._overlaps = reduction.overlaps
        self._corrections = (reduction.correction,) if reduction.correction else ()
        self._weights = layout.allocate(server.device)
        self._weights.copy_(server.state)
        self._payload = layout.allocate(server.device)
        self._counts = _integers(server.state)

    @property
    def weights(self) -> FlatBuffers:
        """The worker's own."""
        return self._weights

    @property
    def payload(self) -> FlatBuffers:
        """The worker's own step, or as many as there were since the last sum."""
        return self._payload

    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Correct the gradient, and step."""
        compensations: tuple[Compensation, ...] = ()
        finite = True
        if self._corrections and self._is_apart():
            compensations, finite = self.server.compensate(
                self._corrections, self.gradient, self._weights, 1, squared_norm
            )
        if finite:
            self._step(update)
            self._write_payload(share)
        else:
            self.skip()
        return Contribution(finite, compensations)

    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, *, adopts: bool) -> Step | None:
        """Move the average by the mean of the steps."""
        for average, step in _pairs(self.average, total):
            if average.dtype == torch.bool:
                average.logical_or_(step)
            elif _is_a_mean(average):
                average.add_(step, alpha=1 / shares)
            else:
                average.add_(step)
        if adopts and not self._overlaps:  # else the worker is on its way already
            self.reset_to_average()
        return None

    def advance(self, update: Apply) -> None:
        """Let the schedule go on, which the worker's own step leaves where it is."""
        self.server.advance(update)

    def skip(self) -> None:
        """Hand in nothing, and go on from the average, or from where this worker is until the next sum."""
        if self._overlaps:
            self.reset_to_average()
        self._take_counts_back()
        super().skip()

    def reset_to_average(self) -> None:
        """Forget where this worker has gone by itself."""
        self._weights.copy_(self.average)
        self._counts = _integers(self.average)

    def restore_from(self, state: Mapping[str, Any], *, keeps_state: bool) -> None:
        """Keep the momentum, which is each worker's own: the mean of many is less noisy than any of them."""
        if keeps_state:
            own = self.server.optimizer.state_dict()["state"]
            state = {**state, "optimizer": {**state["optimizer"], "state": own}}
        super().restore_from(state, keeps_state=keeps_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's own weights, too."""
        return {**super().state_dict(), "weights": self._weights.memory.clone(), "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        super().load_state_dict(state)
        copy_checked(self._weights.memory, state["weights"])
        self._counts = list(state["counts"])

    def _step(self, update: Apply) -> None:
        average = self.average
        if self._overlaps:
            self.reset_to_average()
        self.server.rebind_storage(self._weights)
        self.server.enqueue(self.gradient, samples=1)
        self.server.step(update)
        self.server.rebind_storage(average)

    def _write_payload(self, share: float) -> None:
        self._take_counts_back()
        for step, weights, average in _pairs(self._payload, self._weights, self.average):
            if step.dtype == torch.bool:
                step.copy_(weights)
            else:
                torch.sub(weights, average, out=step)
        _scale(self._payload, share)

    def _take_counts_back(self) -> None:
        """Let the average be without what an evaluation between two sums had counted: it is told of once more."""
        for flat, counted in zip(_integer_buffers(self.average), self._counts, strict=True):
            flat.copy_(counted)

    def _is_apart(self) -> bool:
        return any(map(_are_apart, self.average.flat_parameters, self._weights.flat_parameters))


def make_algorithm(reduction: AllReduceConfig, server: ParameterServer, layout: FlatLayout) -> AllReduceAlgorithm:
    """Return a worker of this kind."""
    if reduction.sums == "gradients":
        return GradientAveraging(server, layout)
    return UpdateAveraging(server, layout, reduction)


def add_payload(total: FlatBuffers, payload: FlatBuffers, *, is_first: bool) -> None:
    """Add what one more worker has handed in to the sum, or begin the sum with it."""
    if is_first:
        total.copy_(payload)
        return
    for sums, each in _pairs(total, payload):
        if sums.dtype == torch.bool:
            sums.logical_or_(each)
        else:
            sums.add_(each)


def _are_apart(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two vectors differ by more than rounding in some part; mostly the first one tells already."""
    eps = torch.finfo(first.dtype).eps
    return any(_norm(a.sub(b)) > eps * _norm(a) for a, b in zip(first.split(BLOCK), second.split(BLOCK), strict=True))


def _norm(block: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(block))


def _pairs(*vectors: FlatBuffers) -> zip[tuple[torch.Tensor, ...]]:
    return zip(*([*each.flat_parameters, *each.flat_buffers] for each in vectors), strict=True)


def _integer_buffers(vectors: FlatBuffers) -> list[torch.Tensor]:
    return [flat for flat in vectors.flat_buffers if not _is_a_mean(flat) and flat.dtype != torch.bool]


def _integers(vectors: FlatBuffers) -> list[torch.Tensor]:
    return [flat.clone() for flat in _integer_buffers(vectors)]


def _is_a_mean(flat: torch.Tensor) -> bool:
    return flat.is_floating_point() or flat.is_complex()


def _scale(vectors: FlatBuffers, factor: float) -> None:
    """Multiply what is a mean, and not a count."""
    if factor == 1.0:
        return
    for flat in [*vectors.flat_parameters, *vectors.flat_buffers]:
        if _is_a_mean(flat):
            flat.mul_(factor)
