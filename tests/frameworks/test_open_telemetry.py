"""OpenTelemetry gets the numbers of the history, from the provider of the application and over OTLP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import paceline as pl
from paceline.recording.metrics.registry import METRICS
from tiny_jobs import tiny_job

pytestmark = pytest.mark.integrations


def run(callback):
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
    return pl.train(
        tiny_job(), protocol="k_async(k=3)", cluster=cluster, stop="updates=30", seed=3, callbacks=[callback]
    ).history


def numbers(points):
    """Return the values by attributes; of a histogram, the number and the sum of the values."""
    return {
        tuple(point.attributes.values()): point.value if hasattr(point, "value") else (point.count, point.sum)
        for point in points
    }


def test_the_provider_of_the_application_gets_all_metrics():
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = metrics.export.InMemoryMetricReader()
    history = run(pl.callbacks.OpenTelemetry(metrics.MeterProvider([reader]), attributes={"run": "a"}))
    [resource] = reader.get_metrics_data().resource_metrics
    found = {each.name: each for each in resource.scope_metrics[0].metrics}
    totals = history.totals
    assert numbers(found["paceline.updates"].data.data_points) == {("a",): 30}
    assert numbers(found["paceline.gradients"].data.data_points)["a", "used"] == totals.used
    assert numbers(found["paceline.staleness"].data.data_points) == {
        ("a",): (totals.used, sum(tau * count for tau, count in totals.staleness.items()))
    }
    round_trips = numbers(found["paceline.round_trip"].data.data_points)
    assert set(round_trips) == {("a", str(worker)) for worker in range(4)}
    assert sum(count for count, _ in round_trips.values()) == len(history.of(pl.callbacks.GradientArrived))
    assert found["paceline.round_trip"].unit == "s"
    assert set(found) == {metric.otel_name for metric in METRICS} - {"paceline.evaluation"}  # there were none


@pytest.fixture
def collector(monkeypatch):
    """Collector of OTLP over HTTP; yields the requests that it has got."""
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(service.ExportMetricsServiceRequest.FromString(content))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_the_last_values_over_http(collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    history = run(pl.callbacks.OpenTelemetry())
    found = {each.name: each for each in collector[-1].resource_metrics[0].scope_metrics[0].metrics}
    assert [point.as_int for point in found["paceline.updates"].sum.data_points] == [history.totals.updates]


def test_a_collector_that_is_gone_does_not_stop_the_run(monkeypatch, caplog):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert run(pl.callbacks.OpenTelemetry()).totals.updates == 30
    assert "Failed to export" in caplog.text
