"""Weight of a loop's gradients in the mean of an update: its samples, or what the loop says."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from torch import Tensor

from paceline.errors import RunError, UsageError
from paceline.jobs.loss_graph import read_loss
from paceline.protocols.protocol import Plan

READ_ALWAYS, READ_EVERY = 10, 100  # losses; reading one may wait for its device


class LossWeight:
    """Weight of the gradient of each step.

    Under a protocol that cuts minibatches into leases, each counts by its samples. So the graph of a loss has to show a
    mean over samples, unless the loop says what its mean is over.

    Args:
        samples: returns the samples of the batch of this rank.
    """

    def __init__(self, samples: Callable[[], int]) -> None:
        self._samples = samples
        self._cutting = ""  # plan that cuts minibatches
        self._seen = 0  # losses
        self._is_weighed = False  # whether the loop has weighed a step
        self._given: float | None = None
        self._unknown = ""  # operation of a loss that is no mean over samples, as far as is known

    def start(self, plan: Plan) -> None:
        """Read the losses of a run if the plan cuts minibatches."""
        self._cutting = str(plan) if plan.sets_shares else ""

    def look(self, loss: Tensor) -> None:
        """Look at a loss before its backward pass."""
        if not self._cutting or self._is_weighed:
            return
        self._seen += 1
        if self._seen <= READ_ALWAYS or self._seen % READ_EVERY == 0:
            reading = read_loss(loss, self._samples())
            if reading.weighing != "samples":
                self._unknown = reading.name

    def add(self, weight: float | Tensor) -> None:
        """Add to the weight of the next step.

        Raises:
            UsageError: it is negative or not finite.
        """
        value = float(weight)
        if value < 0 or not isfinite(value):
            raise UsageError(f"run.weight({value:g}), expected a number >= 0, as the tokens of the batch that count")
        self._given = value + (self._given or 0.0)
        self._is_weighed = True

    def take(self) -> float | None:
        """Return the weight of a step; None for its samples.

        Raises:
            UsageError: the loss is not known to be a mean over samples.
            RunError: earlier steps had a weight.
        """
        given, self._given = self._given, None
        if self._cutting and not self._seen:
            self._unknown = "backward() was not seen"
        if given is None and self._is_weighed:
            raise RunError("run.weight() was not called in this step, but in an earlier one: call it in each step")
        if given is None and self._unknown:
            raise UsageError(
                f"{self._cutting} computes parts of a minibatch, which count by their samples, but the graph of the "
                f"loss does not show a mean over samples ({self._unknown}): call run.weight(n) before "
                "optimizer.step(), with the number n that the loss is a mean over, as its tokens or len(x); for a sum, "
                "or a loss that compares samples, give bsp"
            )
        return given

    def drop(self) -> None:
        """Forget the weight of a step that is left out."""
        self._given = None
