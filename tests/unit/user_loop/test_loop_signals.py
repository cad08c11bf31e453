"""Ctrl-C and SIGTERM in an attached loop: the first one leaves the run; defaults and handlers of the user return."""

import os
import signal

import pytest

from paceline.user_loop.hooks.loop_signals import DEFAULTS, LoopSignals


@pytest.fixture(autouse=True)
def default():
    before = {number: signal.signal(number, default) for number, default in DEFAULTS.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def leaving(reasons):
    return lambda reason: reasons.append(reason) or True


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_the_first_signal_leaves_and_the_second_has_the_default(number, name):
    reasons = []
    LoopSignals(leaving(reasons))
    os.kill(os.getpid(), number)
    assert reasons == [name]
    assert {each: signal.getsignal(each) for each in DEFAULTS} == DEFAULTS


def test_after_the_end_of_the_run_the_default_is_back():
    LoopSignals(leaving([])).close()
    assert {each: signal.getsignal(each) for each in DEFAULTS} == DEFAULTS


def test_a_handler_of_the_user_stays():
    caught, reasons = [], []
    signal.signal(signal.SIGTERM, lambda *_: caught.append("user"))
    handler = LoopSignals(leaving(reasons))
    os.kill(os.getpid(), signal.SIGTERM)
    handler.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (caught, reasons) == (["user", "user"], [])


def test_without_a_run_to_leave_the_signal_has_its_default_effect(monkeypatch):
    sent = []
    LoopSignals(lambda reason: False)
    monkeypatch.setattr(os, "kill", lambda *signal: sent.append(signal))
    signal.raise_signal(signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_without_a_run_to_leave_ctrl_c_ends_the_process_without_a_traceback():
    LoopSignals(lambda reason: False)
    with pytest.raises(SystemExit) as left:
        signal.raise_signal(signal.SIGINT)
    assert left.value.code == 130
