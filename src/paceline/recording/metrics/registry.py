"""Registry of the metrics of a run: name, unit, label and description of each, for all exporters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from math import isnan
from typing import Any, Generic, TypeVar

from paceline.core.records import GradientArrived, UpdateMade
from paceline.recording.metrics.run_measurements import (
    ROUND_TRIP_S,
    STALENESS,
    Histogram,
    RunMeasurements,
    worker_label,
)

T = TypeVar("T")
UNIT_WORDS = {"": "", "s": "seconds", "By": "bytes"}  # of Prometheus, by the unit in UCUM, which OpenTelemetry uses


@dataclass(frozen=True)
class Metric(Generic[T]):
    """Metric of a run.

    Attributes:
        name: name without prefix and unit.
        description: description for users.
        read: function that returns the present values by label value; by "" without a label.
        label: name of the label; empty for none.
        unit: unit in UCUM; empty for a number.
    """

    name: str
    description: str
    read: Callable[[RunMeasurements], Mapping[str, T]]
    _: KW_ONLY
    label: str = ""
    unit: str = ""

    @property
    def prometheus_name(self) -> str:
        """Name at Prometheus, without the suffix of a counter.

        >>> Metric("round_trip", "Round-trip time.", lambda run: {}, unit="s").prometheus_name
        'paceline_round_trip_seconds'
        """
        words = ["paceline", self.name, UNIT_WORDS[self.unit]]
        return "_".join(word for word in dict.fromkeys(words) if word)

    @property
    def otel_name(self) -> str:
        """Name at OpenTelemetry."""
        return f"paceline.{self.name}"


@dataclass(frozen=True, kw_only=True)
class HistogramMetric(Metric[Histogram]):
    """Metric with a distribution.

    Attributes:
        bounds: upper bounds of the buckets.
        observe: function that returns the label value and the value of a gradient; None if it has none.
    """

    bounds: tuple[float, ...] = ()
    observe: Callable[[GradientArrived], tuple[str, float] | None] = lambda gradient: None


def _of_update(value: Callable[[UpdateMade], float]) -> Callable[[RunMeasurements], Mapping[str, float]]:
    """Return a function that reads a number of the latest update, if it is known."""

    def read(run: RunMeasurements) -> Mapping[str, float]:
        return {} if run.update is None or isnan(value(run.update)) else {"": value(run.update)}

    return read


def _gradients(run: RunMeasurements) -> Mapping[str, float]:
    return {"used": run.totals.used, **run.dropped, "interrupted": run.totals.interrupted}


COUNTERS: tuple[Metric[float], ...] = (
    Metric("updates", "Updates of the parameters.", lambda run: {"": run.totals.updates}),
    Metric("gradients", "Gradients by their outcome.", _gradients, label="outcome"),
    Metric(
        "samples",
        "Samples of used gradients, and of dropped or interrupted ones.",
        lambda run: {"used": run.totals.samples_used, "dropped": run.totals.samples_dropped},
        label="outcome",
    ),
    Metric(
        "bytes",
        "Bytes that rank 0 has exchanged with other processes, without sums of gloo and NCCL.",
        lambda run: {"sent": run.network.sent_bytes, "received": run.network.received_bytes},
        label="direction",
        unit="By",
    ),
    Metric(
        "rejected_connections",
        "Connections that rank 0 has rejected, by their cause.",
        lambda run: {cause.value: count for cause, count in run.network.rejected.items()},
        label="cause",
    ),
    Metric("lost_workers", "Losses of a worker.", lambda run: {"": run.lost_workers}),
    Metric("worker_busy", "Worker-seconds of work.", _of_update(lambda update: update.busy_s), unit="s"),
    Metric("worker_live", "Worker-seconds of live workers.", _of_update(lambda update: update.live_s), unit="s"),
)

GAUGES: tuple[Metric[float], ...] = (
    Metric("loss", "Mean training loss of the latest update.", _of_update(lambda update: update.loss)),
    Metric("quorum", "Gradients in the latest update.", _of_update(lambda update: update.k)),
    Metric("learning_rate", "Learning rate of the latest update.", _of_update(lambda update: update.learning_rate)),
    Metric("live_workers", "Workers that take part.", lambda run: {"": len(run.live)}),
    Metric("evaluation", "Metrics of the latest evaluation.", lambda run: run.metrics, label="metric"),
    Metric(
        "last_update_timestamp",
        "Time of the latest update, since 1970.",
        lambda run: {"": run.updated_s} if run.updated_s else {},
        unit="s",
    ),
)

HISTOGRAMS: tuple[HistogramMetric, ...] = (
    HistogramMetric(
        "round_trip",
        "Time from the assignment of work to the arrival of its gradient, on the clock of the run.",
        lambda run: {worker_label(worker): times for worker, times in run.round_trips.copy().items()},
        label="worker",
        unit="s",
        bounds=ROUND_TRIP_S,
        observe=lambda gradient: (worker_label(gradient.worker), gradient.event_s - gradient.started_s),
    ),
    HistogramMetric(
        "staleness",
        "Staleness of used gradients, in versions.",
        lambda run: {"": run.staleness},
        bounds=STALENESS,
        observe=lambda gradient: ("", gradient.staleness) if gradient.used else None,
    ),
)

METRICS: tuple[Metric[Any], ...] = (*COUNTERS, *GAUGES, *HISTOGRAMS)
