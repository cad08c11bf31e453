"""When a run ends: the conditions, and what notices that one is reached."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf, nan
from typing import Any

from paceline import events
from paceline.errors import UsageError, did_you_mean
from paceline.events import Outcome

LEAST_LOSS_WINDOW = 10
TARGETS = (Outcome.LOSS, Outcome.ACCURACY, Outcome.EVAL_LOSS)


@dataclass(frozen=True)
class Stop:
    """The conditions of which the first to be reached ends the run; they are looked at when an update is made.

    Args:
        loss: mean training loss of the last max(n, 10) accepted gradients, at or below.
        accuracy: of an evaluation, at or above, in (0, 1].
        eval_loss: loss of an evaluation, at or below.
        updates: updates made.
        gradients: workload, in accepted gradients.
        epochs: workload, in passes over the training data.
        seconds: of the run's clock; which may end a run between updates, as an evaluation may.
        max_loss: mean training loss of the last max(n, 10) accepted gradients, at or above: training has diverged,
            and the run has failed.

    Raises:
        UsageError: no condition is given, or one is out of its range.

    Example:
        >>> Stop.parse("loss=0.2,seconds=600")
        Stop(loss=0.2, seconds=600)
    """

    loss: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None
    updates: int | None = None
    gradients: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        ends = [f.name for f in fields(self) if f.name != "max_loss"]
        if not any(name in self.given for name in ends):
            raise UsageError(f"a run needs an end; give Stop({'= or '.join(ends)}=)")
        for name, value in self.given.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
                raise UsageError(f"stop {name} = {value!r}, expected a number > 0")
        for name in ("updates", "gradients"):
            if not isinstance(self.given.get(name, 1), int):
                raise UsageError(f"stop {name} = {self.given[name]!r}, expected a whole number")
        if self.accuracy is not None and self.accuracy > 1:
            raise UsageError(f"stop accuracy = {self.accuracy!r}, expected a share, as 0.97")
        if self.loss is not None and self.max_loss is not None and self.max_loss <= self.loss:
            raise UsageError(
                f"stop max_loss = {self.max_loss!r}, expected more than the loss = {self.loss!r} to be reached"
            )

    def __repr__(self) -> str:
        return f"Stop({', '.join(f'{name}={value}' for name, value in self.given.items())})"

    @property
    def given(self) -> dict[str, float]:
        """The conditions that are set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def targets(self) -> dict[str, float]:
        """The conditions on how well the model has learnt, as opposed to how long it has been at it."""
        return {name: value for name, value in self.given.items() if name in TARGETS}

    @property
    def goal(self) -> str:
        """What the time is the time to, as "loss 0.2"."""
        targets = [f"{name} {value:g}" for name, value in self.targets.items()]
        return " or ".join(targets).replace("eval_loss", "evaluated loss") or "the end"

    @property
    def needs_evaluation(self) -> bool:
        """Whether it looks at evaluations."""
        return self.accuracy is not None or self.eval_loss is not None

    def workload(self, per_epoch: float | None) -> float | None:
        """Return the gradients of the whole run if these conditions fix them.

        Args:
            per_epoch: gradients of one epoch, None if the data have no length.
        """
        if self.epochs is not None and per_epoch is None:
            raise UsageError(f"stop epochs = {self.epochs}: these data have no length; give gradients= instead")
        limits = [self.gradients, self.epochs and per_epoch and self.epochs * per_epoch]
        return min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def parse(cls, text: str) -> "Stop":
        """Read conditions such as ``loss=0.2,seconds=60``, or as ``str`` writes them."""
        text = text.removeprefix("Stop(").removesuffix(")")
        known = [f.name for f in fields(cls)]
        conditions: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = (piece.strip() for piece in part.partition("="))
            if name not in known:
                raise UsageError(f"stop condition {name!r} is not known{did_you_mean(name, known)}")
            try:
                value = float(number)
            except ValueError:
                raise UsageError(f"stop {part.strip()!r}, expected a number, as in {name}=10") from None
            if name in conditions:
                raise UsageError(f"stop {name} is given twice in {text!r}; expected once")
            conditions[name] = int(value) if value.is_integer() else value
        return cls(**conditions)  # type: ignore[arg-type]  # checked when built


class StopWatch:
    """Notices the first condition to be reached; each method answers with the end of the run, or None.

    Args:
        stop: the conditions.
        workers: n; the loss is looked at over the last max(n, 10) accepted gradients.
        per_epoch: gradients of one epoch, None if the data have no length.
    """

    def __init__(self, stop: Stop, workers: int, per_epoch: float | None) -> None:
        self.seconds = stop.seconds
        self._stop = stop
        self._updates = stop.updates or inf
        self._gradients = stop.workload(per_epoch) or inf
        self._losses: deque[float] = deque(maxlen=max(workers, LEAST_LOSS_WINDOW))

    def accept(self, loss: float) -> None:
        """Take in the loss of an accepted gradient."""
        self._losses.append(loss)

    def after_update(self, version: int, workload: int) -> events.Stop | None:
        """Look at everything that an update changes."""
        found = self._loss_reached()
        if found is not None:
            return found
        if version >= self._updates:
            return events.Stop(Outcome.UPDATES, f"{version} updates made")
        if workload < self._gradients:
            return None
        if self._gradients == self._stop.gradients:
            return events.Stop(Outcome.GRADIENTS, f"{workload} gradients applied")
        return events.Stop(Outcome.EPOCHS, f"{self._stop.epochs:g} epochs, {workload} gradients, applied")

    def _loss_reached(self) -> events.Stop | None:
        target, most = self._stop.loss, self._stop.max_loss
        if (target is None and most is None) or len(self._losses) < (self._losses.maxlen or 0):
            return None
        mean = sum(self._losses) / len(self._losses)
        if target is not None and mean <= target:
            return events.Stop(Outcome.LOSS, f"mean loss {mean:.6g} reached the target {target:g}")
        if most is not None and mean >= most:
            return events.Stop(Outcome.DIVERGED, f"training diverged: mean loss {mean:.6g} reached max_loss {most:g}")
        return None

    def at(self, now: float) -> events.Stop | None:
        """Look at the clock."""
        if self.seconds is None or now < self.seconds:
            return None
        return events.Stop(Outcome.SECONDS, f"{self.seconds:g} seconds have passed")

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that are looked at."""
        return {"losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state, perhaps under other conditions."""
        self._losses.extend(state["losses"])

    def after_evaluation(self, version: int, metrics: Mapping[str, float]) -> events.Stop | None:
        """Look at the metrics of a version."""
        loss, loss_target = metrics.get("loss", nan), self._stop.eval_loss
        if loss_target is not None and loss <= loss_target:
            reason = f"evaluated loss {loss:.6g} of version {version} reached the target {loss_target:g}"
            return events.Stop(Outcome.EVAL_LOSS, reason)
        target = self._stop.accuracy
        if target is None:
            return None
        accuracy = metrics.get("accuracy")
        if accuracy is None:
            return events.Stop(
                Outcome.FAILED,
                f"the stop waits for an accuracy, but evaluation gives {', '.join(metrics)} only; "
                "return it from step as (loss, {'accuracy': ...})",
            )
        if accuracy < target:
            return None
        reason = f"accuracy {accuracy:.4f} of version {version} reached the target {target:g}"
        return events.Stop(Outcome.ACCURACY, reason)
