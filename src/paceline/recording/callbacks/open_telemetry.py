"""Metrics of a run for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from paceline.core.records import GradientArrived, Record
from paceline.errors import UsageError
from paceline.recording.callback import RunInfo
from paceline.recording.callbacks.tracker import warn_of_failure
from paceline.recording.metrics.exporter import MetricsExporter
from paceline.recording.metrics.registry import COUNTERS, GAUGES, HISTOGRAMS, Metric
from paceline.utils.argument_types import checked_types
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
CLOSE_TIMEOUT_MS = 10_000


@checked_types
class OpenTelemetry(MetricsExporter):
    """Callback that gives the metrics of a run to OpenTelemetry.

    They are those of `Prometheus`, with names such as ``paceline.round_trip``. If the provider fails, the failure is
    logged and the run continues without it.

    Args:
        meter_provider: provider of the application; None for one that sends to ``OTEL_EXPORTER_OTLP_ENDPOINT`` by
            OTLP over HTTP, with the other variables of OpenTelemetry.
        attributes: attributes that all metrics of this run have.

    Raises:
        UsageError: opentelemetry is not installed, or the provider is none.
    """

    def __init__(self, meter_provider: Any = None, *, attributes: Mapping[str, str] | None = None) -> None:
        if meter_provider is not None and not hasattr(meter_provider, "get_meter"):
            raise UsageError(f"meter_provider={meter_provider!r}, expected opentelemetry.metrics.get_meter_provider()")
        needed = ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"] if meter_provider is None else []
        if not all(_is_installed(name) for name in ["opentelemetry", *needed]):
            raise UsageError("opentelemetry is not installed; run: pip install 'paceline[opentelemetry]'")
        self._given = meter_provider
        self._attributes = dict(attributes or {})
        self._own: Any = None
        self._histograms: list[tuple[Any, str, Callable[[GradientArrived], tuple[str, float] | None]]] = []

    def on_start(self, run: RunInfo) -> None:
        """Make the instruments."""
        super().on_start(run)
        self._histograms = []
        try:
            self._make_instruments()
        except Exception as error:
            self._fail(error)

    def _make_instruments(self) -> None:
        if self._given is None:
            self._own = _otlp_provider()
        meter = (self._given or self._own).get_meter("paceline", version("paceline"))
        for metric in COUNTERS:
            meter.create_observable_counter(*self._described(metric))
        for metric in GAUGES:
            meter.create_observable_gauge(*self._described(metric))
        for histogram in HISTOGRAMS:
            instrument = meter.create_histogram(
                histogram.otel_name,
                histogram.unit,
                histogram.description,
                explicit_bucket_boundaries_advisory=histogram.bounds,
            )
            self._histograms.append((instrument, histogram.label, histogram.observe))

    def on_record(self, record: Record) -> None:
        """Add a record, and a gradient to the histograms."""
        super().on_record(record)
        if type(record) is GradientArrived:
            try:
                self._observe(record)
            except Exception as error:
                self._fail(error)

    def _observe(self, gradient: GradientArrived) -> None:
        for instrument, label, observe in self._histograms:
            observed = observe(gradient)
            if observed is not None:
                value, number = observed
                instrument.record(number, {**self._attributes, **({label: value} if label else {})})

    def _fail(self, error: Exception) -> None:
        """Log a failure and drop the histograms; the provider itself reads the other instruments."""
        self._histograms = []
        warn_of_failure("OpenTelemetry", error)

    def close(self) -> None:
        """Send the last values, if the provider is that of this callback."""
        if self._own is None:
            return
        try:
            self._own.shutdown(timeout_millis=CLOSE_TIMEOUT_MS)
        except Exception as error:  # of an exporter
            LOG.warning("OpenTelemetry failed (%s): the last values may be missing", error)
        self._own = None

    def _described(self, metric: Metric[float]) -> tuple[str, list[Callable[[Any], Iterable[Any]]], str, str]:
        """Return name, function, unit and description of an observable instrument."""
        from opentelemetry.metrics import Observation

        def observe(options: Any) -> Iterable[Any]:
            for value, number in metric.read(self.run).items():
                yield Observation(number, {**self._attributes, **({metric.label: value} if metric.label else {})})

        return metric.otel_name, [observe], metric.unit, metric.description


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _otlp_provider() -> Any:
    """Return a provider that sends at intervals, in a thread of its own; a failed transfer is logged there."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())])
