"""Progress of a run: smoothed loss, latest metrics, and the share of the nearest stop condition."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.records import UpdateMade
from paceline.core.stop import Stop
from paceline.core.targets import Target, share_reached

SMOOTHING = 0.9


class ProgressShare:
    """Progress of a run towards the first of its stop conditions, from its updates and evaluations.

    Args:
        stop: stop conditions of the run.
        workload: number of gradients in the whole run, None if the stop does not fix it.

    Attributes:
        loss: exponential mean of the training losses, None before the first update.
        metrics: metrics of the latest evaluation.
    """

    def __init__(self, stop: Stop, workload: float | None) -> None:
        self.loss: float | None = None
        self.metrics: Mapping[str, float] = {}
        self._stop = stop
        self._targets = {target.metric: target for target in stop.evaluated}
        self._workload = workload
        self._first_loss: float | None = None
        self._first: Mapping[str, float] = {}

    def take_update(self, update: UpdateMade) -> None:
        """Add an update."""
        if update.loss == update.loss:
            before = update.loss if self.loss is None else self.loss
            self.loss = SMOOTHING * before + (1 - SMOOTHING) * update.loss
            if self._first_loss is None:
                self._first_loss = self.loss

    def take_metrics(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of an evaluation."""
        self.metrics = metrics
        self._first = self._first or metrics

    def share(self, update: UpdateMade) -> float:
        """Return the progress at this update, 0 to 1, by the nearest stop condition."""
        stop = self._stop
        shares = [
            update.version / stop.updates if stop.updates else 0.0,
            update.workload / self._workload if self._workload else 0.0,
            update.now_s / stop.seconds if stop.seconds else 0.0,
            *(self._of_target(target) for target in self._targets.values()),
        ]
        if stop.loss is not None and self.loss is not None and self._first_loss is not None:
            shares.append(share_reached(self._first_loss, self.loss, stop.loss))
        return min(1.0, max(shares))

    def figures(self, *, targets: bool = True) -> list[str]:
        """Return loss and metrics as short texts, those with a target first.

        Args:
            targets: whether to include the targets.
        """
        names = sorted(self.metrics, key=lambda name: (name not in self._targets, name == "loss"))
        bounds = {name: target.value for name, target in self._targets.items()} if targets else {}
        loss = [] if self.loss is None else [_figure("loss", self.loss, self._stop.loss if targets else None)]
        shown = {name: "eval loss" if name == "loss" else name for name in names}
        return loss + [_figure(shown[name], self.metrics[name], bounds.get(name)) for name in names]

    def _of_target(self, target: Target) -> float:
        first, now = self._first.get(target.metric), self.metrics.get(target.metric)
        return 0.0 if first is None or now is None else share_reached(first, now, target.value)


def _figure(name: str, value: float, target: float | None) -> str:
    return f"{name} {value:.4g}" + ("" if target is None else f" (target {target:g})")
