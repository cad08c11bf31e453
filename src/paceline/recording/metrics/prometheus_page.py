"""Page of metrics in the formats of Prometheus; this module needs prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from paceline.recording.metrics.http_server import Page
from paceline.recording.metrics.registry import COUNTERS, GAUGES, HISTOGRAMS, Metric
from paceline.recording.metrics.run_measurements import RunMeasurements


class PrometheusPage:
    """Page that Prometheus reads, in a registry of its own.

    Args:
        run: measurements, which are read for each page.
        labels: labels of all metrics.
    """

    def __init__(self, run: RunMeasurements, labels: Mapping[str, str]) -> None:
        self._run = run
        self._labels = labels
        self._registry: Any = CollectorRegistry()
        self._registry.register(self)

    def __call__(self, accepted: str) -> Page:
        """Return the page in one of the accepted formats."""
        encode, content_type = choose_encoder(accepted)
        return Page(encode(self._registry), content_type)

    def collect(self) -> Iterator[Any]:
        """Yield the present values of all metrics; the registry calls this."""
        for kind, metrics in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for metric in metrics:
                family = self._family(kind, metric)
                for value, number in metric.read(self._run).items():
                    family.add_metric(self._label_values(metric, value), number)
                yield family
        for each in HISTOGRAMS:
            family = self._family(HistogramMetricFamily, each)
            for value, histogram in each.read(self._run).items():
                bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                family.add_metric(self._label_values(each, value), buckets, histogram.sum)
            yield family

    def _family(self, kind: Any, metric: Metric[Any]) -> Any:
        own = [metric.label] if metric.label else []
        return kind(metric.prometheus_name, metric.description, labels=[*self._labels, *own])

    def _label_values(self, metric: Metric[Any], value: str) -> list[str]:
        return [*self._labels.values(), *([value] if metric.label else [])]
