"""A provider of OpenTelemetry that fails does not stop a run; the package need not be installed here."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import paceline as pl
from paceline.recording.callbacks import open_telemetry
from tiny_jobs import tiny_job


@pytest.fixture(autouse=True)
def _package(monkeypatch):
    monkeypatch.setattr(open_telemetry, "_is_installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "opentelemetry", ModuleType("opentelemetry"))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", SimpleNamespace(Observation=tuple))


class Provider:
    """Provider and meter, of which one method fails."""

    def __init__(self, failing):
        self.records = 0
        self._failing = failing

    def __getattr__(self, name):
        return lambda *arguments, **named: self._call(name)

    def _call(self, name):
        self.records += name == "record"
        if name == self._failing:
            raise ConnectionError("the collector is gone")
        return self


@pytest.mark.parametrize("failing", ["get_meter", "create_observable_gauge", "create_histogram", "record"])
def test_a_provider_that_fails_is_logged_once_and_left_out(failing, caplog):
    provider = Provider(failing)
    callback = pl.callbacks.OpenTelemetry(provider)
    cluster = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
    run = pl.train(tiny_job(), protocol="k_sync(k=2)", cluster=cluster, stop="updates=10", callbacks=[callback])
    assert run.history.totals.updates == 10
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["OpenTelemetry failed (ConnectionError: the collector is gone): the run continues without it"]
    assert provider.records == (failing == "record")
