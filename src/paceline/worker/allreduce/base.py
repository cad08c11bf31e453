"""All-reduce algorithms of a worker without a server, independent of how payloads are communicated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from paceline.core.events import Apply, Compensation, Step
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout
from paceline.utils.state_dict import Stateful


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
        """Vectors that are summed over the workers; of whole numbers and booleans only worker 0 has changes."""

    @abstractmethod
    def contribute(self, squared_norm: float, share: float, update: Apply) -> Contribution:
        """Write the payload of the gradient; the caller drops the counts of all workers but worker 0.

        Args:
            squared_norm: squared norm of the gradient, finite.
            share: samples of the gradient over the batch size, > 0; the weight of the payload.
            update: next update, if all workers contribute.
        """

    @abstractmethod
    def apply_sum(self, total: FlatBuffers, shares: float, update: Apply, fragment: int | None) -> Step | None:
        """Move the average by the sum of the payloads; return the measured step, if there is one.

        Args:
            total: sum of the payloads, or of one fragment of them; may be changed.
            shares: sum of the shares, > 0.
            update: update of this sum.
            fragment: fragment that is summed, from whose average this worker continues; None for a sum of all
                fragments after which this worker continues from its own weights.
        """

    @abstractmethod
    def advance(self, update: Apply) -> None:
        """Advance the schedule by an update, before `apply_sum` if there is a sum."""

    def skip(self) -> None:
        """Contribute zeros; steps of this worker since the last sum are lost."""
        self.payload.memory.zero_()

    def begin_sum(self, fragment: int) -> None:
        """Record that a sum of a fragment of the payloads has begun."""

    def collect_steps(self, worker: int) -> None:
        """Write the steps of this worker that no completed sum contains into the payload, as `contribute` does.

        The average plus the mean of these payloads is the mean of the workers' weights.
        """

    @contextmanager
    def keeping_average(self) -> Iterator[None]:
        """Return a block in which the average may move to the mean of the workers' weights, for an evaluation."""
        yield

    @abstractmethod
    def reset_to_average(self) -> None:
        """Set the weights of this worker to the average."""

    def own_state(self) -> Mapping[Any, Any] | None:
        """Return the state of the optimizer, if each worker has one of its own; else None."""
        return None

    def restore_from(self, state: Mapping[str, Any], own: Mapping[Any, Any] | None = None) -> None:
        """Continue from the average of another worker.

        Args:
            state: state of that worker's server.
            own: state of this worker's own optimizer; None to continue with that of the other worker.
        """
        self.server.load_state_dict(state)
        self.reset_to_average()
