"""Callbacks of a standby: they start at the takeover, and one that cannot start is left out."""

import paceline as pl
from paceline.core.records import RunResumed, RunStarted
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.run.standby import AfterTakeover

RUN = pl.callbacks.RunInfo({}, Totals(), NetworkCounters())
TAKEOVER = RunResumed(now_s=1.0, version=3, workers=2, stop_before="", changes="")


class Kept(pl.callbacks.Callback):
    """Callback that keeps its calls."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append(run)

    def on_resume(self, history):
        self.calls.append(list(history))

    def on_record(self, record):
        self.calls.append(record)

    def close(self):
        self.calls.append("close")


class PortInUse(Kept):
    """Callback that cannot start."""

    def on_start(self, run):
        raise pl.UsageError("its port is in use")


def test_a_callback_starts_at_the_takeover_and_is_closed_after_the_run():
    kept = Kept()
    later = AfterTakeover([kept], None, resumes=False)
    later.on_start(RUN)
    later.on_record(RunStarted(0.0, 2, ""))
    assert kept.calls == []
    later.on_record(TAKEOVER)
    later.close()
    assert kept.calls == [RUN, [], TAKEOVER, "close"]


def test_a_callback_is_not_closed_without_a_takeover():
    kept = Kept()
    later = AfterTakeover([kept], None, resumes=False)
    later.on_start(RUN)
    later.close()
    assert kept.calls == []


def test_a_callback_that_cannot_start_is_left_out_of_the_run(caplog):
    kept, other = Kept(), PortInUse()
    later = AfterTakeover([other, kept], None, resumes=False)
    later.on_start(RUN)
    later.on_record(TAKEOVER)
    assert other.calls == []
    assert kept.calls[-1] == TAKEOVER
    assert "PortInUse is left out after the takeover: its port is in use" in caplog.text
