"""Update averaging: local SGD, DC-S3GD and DiLoCo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.events import Apply, Compensation, Step
from paceline.policies.compensation.base import correction_of
from paceline.protocols.allreduce import AllReduceConfig
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout, copy_checked, is_a_mean, write_difference
from paceline.tensors.stale_arithmetic import BLOCK
from paceline.worker.allreduce.base import AllReduceAlgorithm, Contribution
from paceline.worker.allreduce.outer_steps import begin_outer, step_outer
from paceline.worker.allreduce.own_steps import OwnSteps
from paceline.worker.allreduce.vectors import Sign, drop_counts, pairs, scale


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

    With fragments, w, s_i and the sums are those of one fragment of the model, and each fragment has sums of its own.

    An outer optimizer steps the average at the sums after which the workers continue from it; at other sums, which
    evaluations and the end of the run need, the average is the mean of the workers' parameters.

    Args:
        server: optimizer, schedule and clipping of this worker; its state is the average.
        layout: layout of the model, with a shard for each fragment.
        allreduce: how long sums overlap gradients, their fragments, the correction, and the outer optimizer.

    Source: Rigazzi, "DC-S3GD", 2019, Algorithm 1, eq. (7) to (12), and Sect. V, which names a longer lag; Stich,
    "Local SGD", 2019; Douillard et al., "DiLoCo", 2023.
    """

    def __init__(self, server: ParameterServer, layout: FlatLayout, allreduce: AllReduceConfig) -> None:
        super().__init__(server, layout)
        self._overlaps = allreduce.overlaps
        self._outer = allreduce.outer
        correction = correction_of(allreduce)
        self._corrections = () if correction is None else (correction,)
        self._weights = layout.allocate(server.device)
        self._weights.copy_(server.state)
        self._payload = layout.allocate(server.device)
        self._counts = _integers(server.state)
        self._flat_ranges = layout.flat_ranges
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
            self._add_own_steps(-1)  # so that D_i is the average minus the weights, which `_step` sets anew
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

    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, fragment: int | None) -> Step | None:
        """Move the average by the mean of the steps, or step the outer optimizer with it; no step is measured."""
        if self._outer is not None:
            begin_outer(self.average.flat_parameters, self.server.memory(self._outer))
        moved = self.average if fragment is None else self.average.shards[fragment]
        for average, step in pairs(moved, total):
            if average.dtype == torch.bool:
                average.logical_xor_(step)
            elif is_a_mean(average):
                average.add_(step, alpha=1 / shares)
            else:
                average.add_(step)
        if fragment is not None:
            self._adopt(fragment)
        return None

    def _adopt(self, fragment: int) -> None:
        """Continue from the average of a fragment."""
        if self._outer is not None:
            flats = self.average.flat_parameters
            step_outer(self._outer, flats, self.server.memory(self._outer), self._flat_ranges[fragment])
        if self._own is not None:
            self._own.end_sum()
        if not self._overlaps:  # else its next gradient is under way
            self._set_weights()

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

    def begin_sum(self, fragment: int) -> None:
        """Record that the steps of a fragment so far are in a sum."""
        if self._own is not None:
            self._own.begin_sum(fragment)

    def collect_steps(self, worker: int) -> None:
        """Write the steps of this worker that no completed sum contains, where the payload has fewer."""
        if self._own is not None:
            self._own.write_total(self._payload)
            scale(self._payload, self.share)
            drop_counts(self._payload, worker)

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

    def own_state(self) -> Mapping[Any, Any]:
        """Return the state of this worker's optimizer: the momentum of one worker is not the mean over workers."""
        state: Mapping[Any, Any] = self.server.optimizer.state_dict()["state"]
        return state

    def restore_from(self, state: Mapping[str, Any], own: Mapping[Any, Any] | None = None) -> None:
        """Continue from another worker's average; no sum is under way any more."""
        if own is not None:
            state = {**state, "optimizer": {**state["optimizer"], "state": own}}
        if self._own is not None:
            self._own.clear()
        super().restore_from(state, own)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the weights of this worker."""
        own = self._own.state() if self._own is not None else {}
        weights = self._weights.memory.clone()
        return {**super().state_dict(), "weights": weights, "counts": self._counts, "own": own, "share": self.share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        super().load_state_dict(state)
        copy_checked(self._weights.memory, state["weights"])
        self._counts = list(state["counts"])
        if self._own is not None:
            if isinstance(state.get("own"), Mapping):
                self._own.load(state["own"])
            else:  # a checkpoint of local SGD from before fragments
                self._own.clear()
                self._write_steps()
                self._own.take_newest(self._payload)
        self.share = state.get("share", 0.0)  # missing in early runs

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
        if self._overlaps and self._own is None:  # the step is from the average
            self._counts = _integers(average)
        else:
            if self._overlaps:
                self._set_weights()
            self.server.rebind_storage(self._weights)
        self.server.enqueue(self.gradient, weight=1)
        self.server.step(update, self._weights)
        self.server.rebind_storage(average)

    def _write_payload(self, share: float) -> None:
        self._restore_counts()
        self._write_steps()
        if self._own is not None:
            self._own.take_newest(self._payload)
        scale(self._payload, share)

    def _write_steps(self) -> None:
        """Write all steps since the average into the payload."""
        for step, weights, average in pairs(self._payload, self._weights, self.average):
            if step.dtype == torch.bool:
                torch.logical_xor(weights, average, out=step)
            else:
                write_difference(weights, average, out=step)

    def _restore_counts(self) -> None:
        """Undo changes of integer buffers since the last sum: the next sum contains them."""
        for flat, counted in zip(_integer_buffers(self.average), self._counts, strict=True):
            flat.copy_(counted)

    def _is_apart(self) -> bool:
        return any(map(_are_apart, self.average.flat_parameters, self._weights.flat_parameters))


def _are_apart(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two vectors differ by more than rounding in some block; the first block mostly decides."""
    eps = torch.finfo(first.dtype).eps
    return any(_norm(a.sub(b)) > eps * _norm(a) for a, b in zip(first.split(BLOCK), second.split(BLOCK), strict=True))


def _norm(block: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(block))


def _integer_buffers(vectors: FlatBuffers) -> list[torch.Tensor]:
    return [flat for flat in vectors.flat_buffers if not is_a_mean(flat) and flat.dtype != torch.bool]


def _integers(vectors: FlatBuffers) -> list[torch.Tensor]:
    return [flat.clone() for flat in _integer_buffers(vectors)]
