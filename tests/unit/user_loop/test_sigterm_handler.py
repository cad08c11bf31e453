"""SIGTERM in an attached loop: the rank leaves at the first one; the default and handlers of the user return."""

import os
import signal

import pytest

from paceline.user_loop.sigterm_handler import SigtermHandler


@pytest.fixture(autouse=True)
def default():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def leaving(reasons):
    return lambda reason: reasons.append(reason) or True


def test_the_first_sigterm_leaves_and_the_second_has_the_default(default):
    reasons = []
    SigtermHandler(leaving(reasons))
    os.kill(os.getpid(), signal.SIGTERM)
    assert reasons == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_after_the_end_of_the_run_the_default_is_back():
    SigtermHandler(leaving([])).close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_the_user_stays():
    caught, reasons = [], []
    signal.signal(signal.SIGTERM, lambda *_: caught.append("user"))
    handler = SigtermHandler(leaving(reasons))
    os.kill(os.getpid(), signal.SIGTERM)
    handler.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (caught, reasons) == (["user", "user"], [])


def test_without_a_run_to_leave_the_signal_has_its_default_effect(monkeypatch):
    sent = []
    SigtermHandler(lambda reason: False)
    monkeypatch.setattr(os, "kill", lambda *signal: sent.append(signal))
    signal.raise_signal(signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
