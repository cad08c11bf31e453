"""Prometheus: what is scraped over HTTP is what the history holds."""

import json
import re
import socket
import sys
import time
import urllib.request
from contextlib import closing
from urllib.error import HTTPError, URLError

import pytest

import paceline as pl
from paceline.core.records import VersionEvaluated
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters, RejectionCause
from paceline.recording.metrics.registry import METRICS
from paths import ROOT
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job

parser = pytest.importorskip("prometheus_client.parser")
openmetrics = pytest.importorskip("prometheus_client.openmetrics.parser")

DASHBOARD = ROOT / "examples/grafana/paceline.json"
PLAN = "k_async(k=3)@updates=5 >> backup(k=2)@updates=10 >> k_sync(k=2)"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


class Scrape(pl.callbacks.Callback):
    """Callback that reads a page after the last record of a run."""

    def __init__(self, prometheus, path="/metrics", accept="*/*"):
        self.prometheus = prometheus
        self.path = path
        self.accept = accept

    def on_end(self, end):
        request = urllib.request.Request(self.prometheus.url + self.path, headers={"Accept": self.accept})
        try:
            answer = urllib.request.urlopen(request)
        except HTTPError as error:
            answer = error
        with answer:
            self.status, self.type, self.text = answer.status, answer.headers["Content-Type"], answer.read().decode()


def run(*callbacks, protocol=PLAN, stop="updates=30", **where):
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0), faults=[pl.Fault(worker=1, draw=3, kind="die")])
    job = tiny_job(eval_data=dataset())
    return pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=3, callbacks=callbacks, **where).history


def scraped(prometheus=None, **options):
    """Return the samples of a run by name and labels, and its history."""
    prometheus = prometheus or pl.callbacks.Prometheus(0)
    scrape = Scrape(prometheus)
    history = run(prometheus, scrape, **options)
    return samples(scrape.text), history


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def one_run():
    """Samples and history of one run."""
    return scraped()


def test_scraped_numbers_equal_the_history(one_run):
    assert_equal(*one_run)


def assert_equal(found, history):
    totals, arrivals, updates = (
        history.totals,
        history.of(pl.callbacks.GradientArrived),
        history.of(pl.callbacks.UpdateMade),
    )
    assert totals.used
    assert totals.interrupted
    assert totals.dropped

    def number(name, **labels):
        return found[f"paceline_{name}", *sorted(labels.items())]

    assert number("updates_total") == totals.updates
    assert number("gradients_total", outcome="used") == totals.used
    assert number("gradients_total", outcome="interrupted") == totals.interrupted
    outcomes = [value for (name, *_), value in found.items() if name == "paceline_gradients_total"]
    assert sum(outcomes) == totals.used + totals.dropped + totals.interrupted
    assert number("gradients_total", outcome="other") == 0
    assert number("samples_total", outcome="used") == totals.samples_used
    assert number("samples_total", outcome="dropped") == totals.samples_dropped
    assert number("lost_workers_total") == 1
    assert number("live_workers") == 3
    last = updates[-1]
    assert (number("loss"), number("quorum"), number("learning_rate")) == (last.loss, last.k, last.learning_rate)
    assert number("worker_busy_seconds_total") == last.busy_s
    assert number("worker_live_seconds_total") == last.live_s
    assert number("staleness_count") == totals.used
    assert number("staleness_sum") == sum(tau * count for tau, count in totals.staleness.items())
    assert number("staleness_bucket", le="0.0") == totals.staleness[0]
    for worker in range(4):
        times_s = [each.event_s - each.started_s for each in arrivals if each.worker == worker]
        assert number("round_trip_seconds_count", worker=str(worker)) == len(times_s)
        assert number("round_trip_seconds_sum", worker=str(worker)) == pytest.approx(sum(times_s))
        in_time = sum(seconds <= 0.5 for seconds in times_s)
        assert number("round_trip_seconds_bucket", worker=str(worker), le="0.5") == in_time


@pytest.mark.slow
def test_a_resumed_run_continues_the_counts(tmp_path):
    run(stop="updates=13", out=tmp_path / "run")
    assert_equal(*scraped(resume=tmp_path / "run"))


@pytest.mark.slow
def test_a_second_run_begins_with_zero():
    prometheus = pl.callbacks.Prometheus(0)
    scraped(prometheus)
    assert_equal(*scraped(prometheus))


def test_evaluations_and_the_time_of_the_latest_update_are_served(one_run):
    found, history = one_run
    evaluation = history.of(VersionEvaluated)[-1]
    assert found["paceline_evaluation", ("metric", "loss")] == evaluation.metrics["loss"]
    assert found["paceline_evaluation", ("metric", "accuracy")] == evaluation.metrics["accuracy"]
    assert 0 <= time.time() - found["paceline_last_update_timestamp_seconds",] < 60


def test_counts_of_connections_are_served_as_they_are_now():
    counters, prometheus = NetworkCounters(), pl.callbacks.Prometheus(0)
    prometheus.on_start(pl.callbacks.RunInfo({}, Totals(), counters))
    with closing(prometheus):
        counters.on_sent(3)
        counters.on_received(4)
        counters.on_rejected(RejectionCause.AUTHENTICATION)
        with urllib.request.urlopen(f"{prometheus.url}/metrics") as page:
            found = samples(page.read().decode())
    assert found["paceline_bytes_total", ("direction", "sent")] == 3
    assert found["paceline_bytes_total", ("direction", "received")] == 4
    causes = {labels[0][1]: value for (name, *labels), value in found.items() if name.endswith("connections_total")}
    assert causes == {cause.value: float(cause == "authentication") for cause in RejectionCause}


def test_labels_are_those_of_every_sample():
    found, _ = scraped(pl.callbacks.Prometheus(0, labels={"job": "digits", "run": "7"}))
    assert found
    assert all({("job", "digits"), ("run", "7")} <= set(labels) for _, *labels in found)


@pytest.mark.parametrize(
    ("name", "reason"), [("a-b", "is not a name of letters"), ("worker", "is a label of paceline")]
)
def test_an_invalid_label_is_refused(name, reason):
    with pytest.raises(pl.UsageError, match=f"labels: '{name}' {reason}"):
        pl.callbacks.Prometheus(0, labels={name: "x"})


@parametrize_few(("accept", "kind"), [("*/*", "text/plain"), (OPEN_METRICS, "application/openmetrics-text")], keep=1)
def test_the_format_is_one_that_the_client_accepts(accept, kind):
    prometheus = pl.callbacks.Prometheus(0)
    scrape = Scrape(prometheus, accept=accept)
    run(prometheus, scrape)
    assert scrape.type.startswith(kind)
    expected = openmetrics if accept == OPEN_METRICS else parser
    assert len(list(expected.text_string_to_metric_families(scrape.text))) == len(METRICS)


@parametrize_few(
    ("stale_after_s", "status", "text"),
    [(300.0, 200, "ok\n"), (1e-9, 503, "no update for 0 s, more than stale_after_s=1e-09\n")],
    keep=1,
)
def test_health_depends_on_the_age_of_the_latest_update(stale_after_s, status, text):
    prometheus = pl.callbacks.Prometheus(0, stale_after_s=stale_after_s)
    scrape = Scrape(prometheus, "/health")
    run(prometheus, scrape)
    assert (scrape.status, scrape.text) == (status, text)


def test_a_port_in_use_is_an_error_before_anything_has_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(pl.UsageError, match=rf"127.0.0.1:{port} \(Address already in use\); .* example 9465"):
            run(pl.callbacks.Prometheus(port), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_server_ends_with_a_run_that_fails():
    class Failing(pl.callbacks.Callback):
        def on_update(self, update):
            raise ZeroDivisionError

    prometheus = pl.callbacks.Prometheus(0)
    with pytest.raises(ZeroDivisionError):
        run(prometheus, Failing())
    with pytest.raises(URLError, match="refused"):
        urllib.request.urlopen(prometheus.url)


def test_without_the_client_the_error_names_the_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "paceline.recording.metrics.prometheus_page", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(pl.UsageError, match=r"pip install 'paceline\[metrics\]'"):
        pl.callbacks.Prometheus(0)


def test_the_dashboard_shows_every_metric_and_no_other(one_run):
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    used = set(re.findall(r"paceline_\w+", " ".join(expressions)))
    found, _ = one_run
    exported = {name for name, *_ in found}
    assert used <= exported
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in used}
    assert shown == {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported}
