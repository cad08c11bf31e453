"""Stop conditions of a run, and the monitor that checks them."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf, isfinite
from typing import Any

from paceline.core import events
from paceline.core.events import Outcome
from paceline.core.gradient import mean_by_samples
from paceline.core.targets import MetricTarget, Target, targets
from paceline.errors import UsageError, did_you_mean
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.wording import counted

LEAST_LOSS_WINDOW = 10
TARGETS = (Outcome.LOSS, Outcome.ACCURACY, Outcome.EVAL_LOSS, Outcome.METRIC)


@checked_dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop conditions: the first one that is reached ends the run. They are checked when an update is made.

    Args:
        loss: upper bound on the mean training loss of the last max(n, 10) accepted gradients, > 0; each counts by its
            samples.
        accuracy: lower bound on the accuracy of an evaluation, in (0, 1].
        eval_loss: upper bound on the loss of an evaluation, > 0.
        metric: bound on a metric that `Job.step` returns, as ("nll", "<=", 1.4), or several of them. Written as
            ``nll<=1.4`` in text.
        updates: number of updates, >= 1.
        gradients: workload in accepted gradients, >= 1.
        epochs: workload in passes over the training data, > 0.
        seconds: time on the clock of the run, > 0. It may end a run between updates, as an evaluation may.
        max_loss: mean training loss of the last max(n, 10) accepted gradients from which on training counts as
            diverged, > 0; the run fails.

    Raises:
        UsageError: no condition is given, or a condition is out of its range.

    Example:
        >>> Stop.parse("loss=0.2,seconds=600")
        Stop(loss=0.2, seconds=600)
        >>> Stop.parse("nll<=1.4,updates=500")
        Stop(metric=('nll', '<=', 1.4), updates=500)
    """

    loss: float | None = None
    accuracy: float | None = None
    eval_loss: float | None = None
    metric: MetricTarget | Sequence[MetricTarget] | None = None
    updates: int | None = None
    gradients: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        self._take_metrics()
        ends = [f.name for f in fields(self) if f.name != "max_loss"]
        if self.metric is None and not any(name in self.given for name in ends):
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

    def _take_metrics(self) -> None:
        """Bring the metrics into one form; accuracy and evaluation loss become arguments of their own."""
        kept: list[Target] = []
        for target in targets(self.metric):
            name = target.metric
            if name == "loss":
                raise UsageError(
                    f"stop metric = {tuple(target)}: give eval_loss= for the evaluation loss, loss= for the training "
                    "loss"
                )
            if name in _COMPARISONS:
                _check_own(name, target.comparison, target.value)
                if getattr(self, name) is not None:
                    raise UsageError(f"stop {name} is given twice; expected once")
                object.__setattr__(self, name, target.value)
            elif name in {each.metric for each in kept}:
                raise UsageError(f"stop {name} is given twice; expected once")
            else:
                kept.append(target)
        plain = [tuple(target) for target in kept]
        object.__setattr__(self, "metric", plain[0] if len(plain) == 1 else tuple(plain) or None)

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"Stop({', '.join(f'{name}={value!r}' for name, value in values.items() if value is not None)})"

    def __str__(self) -> str:
        """Return the conditions in the form that `parse` reads."""
        return f"Stop({', '.join(self.conditions)})"

    @property
    def conditions(self) -> list[str]:
        """Conditions in the form of the command line, such as ``loss=0.2`` and ``nll<=1.4``."""
        metrics = [str(target) for target in targets(self.metric)]
        return [*(f"{name}={value}" for name, value in self.given.items()), *metrics]

    @property
    def given(self) -> dict[str, float]:
        """Conditions that are set, without those on metrics of the job."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "metric"}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def evaluated(self) -> tuple[Target, ...]:
        """Targets that are checked after an evaluation."""
        own = [
            Target("loss", "<=", self.eval_loss) if self.eval_loss is not None else None,
            Target("accuracy", ">=", self.accuracy) if self.accuracy is not None else None,
        ]
        return (*(target for target in own if target is not None), *targets(self.metric))

    @property
    def goal(self) -> str:
        """Goal of the run in text, for example "loss 0.2"."""
        return " or ".join(self.targets) or "the end"

    @property
    def targets(self) -> list[str]:
        """Targets of training in text, such as ``loss 0.2``; the other conditions limit its length."""
        loss = [f"loss {self.loss:g}"] if self.loss is not None else []
        return loss + [target.description for target in self.evaluated]

    def workload(self, per_epoch: float | None) -> float | None:
        """Return the gradients of the whole run, or None if the conditions do not fix them.

        Args:
            per_epoch: gradients of one epoch, None if the data have no length.
        """
        if self.epochs is not None and per_epoch is None:
            raise UsageError(f"stop epochs = {self.epochs}: these data have no length; give gradients= instead")
        limits = [self.gradients, self.epochs and per_epoch and self.epochs * per_epoch]
        return min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def parse(cls, text: str) -> "Stop":
        """Read conditions such as ``loss=0.2,nll<=1.4,seconds=60``, or as ``str`` writes them."""
        text = text.removeprefix("Stop(").removesuffix(")")
        conditions: dict[str, float] = {}
        metrics: list[MetricTarget] = []
        for part in text.split(","):
            name, comparison, value = _condition(part)
            if name not in _COMPARISONS:
                metrics.append((name, comparison, value))  # type: ignore[arg-type]  # checked when built
                continue
            if comparison != "=":
                _check_own(name, comparison, value)
            if name in conditions:
                raise UsageError(f"stop {name} is given twice in {text!r}; expected once")
            conditions[name] = value
        return cls(metric=metrics or None, **conditions)  # type: ignore[arg-type]  # checked when built


# Comparison of each built-in condition.
_COMPARISONS = {f.name: ">=" for f in fields(Stop) if f.name != "metric"} | {"loss": "<=", "eval_loss": "<="}
_CONDITION = re.compile(r"([^<>=]*)(<=|>=|=|<|>)(.*)", re.DOTALL)


def _condition(part: str) -> tuple[str, str, float]:
    """Return name, comparison and value of one typed condition."""
    match = _CONDITION.fullmatch(part)
    name, comparison, number = (each.strip() for each in match.groups()) if match else (part.strip(), "=", "")
    if comparison == "=" and name not in _COMPARISONS:
        raise UsageError(
            f"stop condition {name!r} is not known{did_you_mean(name, _COMPARISONS)}; a metric that the job reports is "
            "typed as nll<=1.4 or nll>=1.4"
        )
    if comparison in {"<", ">"}:
        raise UsageError(f"stop {part.strip()!r}, expected {name}{comparison}={number or 10}")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"stop {part.strip()!r}, expected a number, as in {name}{comparison}10") from None
    return name, comparison, int(value) if value.is_integer() else value


def _check_own(name: str, comparison: str, value: float) -> None:
    """Check the comparison of a built-in condition."""
    if comparison != _COMPARISONS[name]:
        raise UsageError(
            f"stop {name}{comparison}{value}: a run ends when {name} is {_COMPARISONS[name]} a value; expected "
            f"{name}={value}"
        )


class StopMonitor:
    """Monitor of the stop conditions; each check returns the end of the run, or None.

    Args:
        stop: conditions.
        workers: number of workers n, >= 1; the training loss is the mean of the last max(n, 10) accepted gradients.
        per_epoch: gradients of one epoch; None if the data have no length.
    """

    def __init__(self, stop: Stop, workers: int, per_epoch: float | None) -> None:
        self.seconds = stop.seconds
        self._stop = stop
        self._updates = stop.updates or inf
        self._gradients = stop.workload(per_epoch) or inf
        self._losses: deque[float] = deque(maxlen=max(workers, LEAST_LOSS_WINDOW))
        self._samples: deque[int] = deque(maxlen=self._losses.maxlen)

    def accept(self, loss: float, samples: int = 1) -> None:
        """Add the loss of an accepted gradient of this number of samples."""
        self._losses.append(loss)
        self._samples.append(samples)

    def after_update(self, version: int, workload: int) -> events.EndRun | None:
        """Check loss, updates and workload."""
        found = self._loss_reached()
        if found is not None:
            return found
        if version >= self._updates:
            return events.EndRun(Outcome.UPDATES, f"{counted(version, 'update')} made")
        if workload < self._gradients:
            return None
        if self._gradients == self._stop.gradients:
            return events.EndRun(Outcome.GRADIENTS, f"{counted(workload, 'gradient')} applied")
        return events.EndRun(
            Outcome.EPOCHS, f"{counted(self._stop.epochs or 0, 'epoch')}, {counted(workload, 'gradient')}, applied"
        )

    def _loss_reached(self) -> events.EndRun | None:
        target, most = self._stop.loss, self._stop.max_loss
        if (target is None and most is None) or len(self._losses) < (self._losses.maxlen or 0):
            return None
        mean = mean_by_samples(self._losses, self._samples)
        if target is not None and mean <= target:
            return events.EndRun(Outcome.LOSS, f"mean loss {mean:.6g} reached the target {target:g}")
        if most is not None and mean >= most:
            return events.EndRun(Outcome.DIVERGED, f"training diverged: mean loss {mean:.6g} reached max_loss {most:g}")
        return None

    def at(self, now: float) -> events.EndRun | None:
        """Check the time, in seconds since the run began."""
        if self.seconds is None or now < self.seconds:
            return None
        return events.EndRun(
            Outcome.SECONDS, f"{counted(self.seconds, 'second')} {'has' if self.seconds == 1 else 'have'} passed"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the recent losses and their samples."""
        return {"losses": list(self._losses), "samples": list(self._samples)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state, also that of other conditions."""
        self._losses.extend(state["losses"])
        self._samples.extend(state.get("samples", [1] * len(state["losses"])))  # missing in early runs

    def after_evaluation(self, version: int, metrics: Mapping[str, float]) -> events.EndRun | None:
        """Check the metrics of a version; a metric that is missing or not finite ends the run too."""
        wanted = [(target, metrics.get(target.metric)) for target in self._stop.evaluated]
        for target, value in wanted:
            if value is not None and target.is_met_by(value):
                return events.EndRun(target.outcome, target.reached(value, version))
        for target, value in wanted:
            if value is None:
                return events.EndRun(Outcome.FAILED, target.missing(list(metrics)))
            if not isfinite(value):
                return events.EndRun(Outcome.NOT_FINITE, target.not_finite(version))
        return None
