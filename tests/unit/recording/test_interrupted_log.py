"""An exception at any bytecode of a method of the event log: the writer still gets its end, and writes each record."""

import sys
import threading

from machine_speed import scaled
from paceline.core.records import TimerRang
from paceline.recording.event_log import EventLog
from selections import parametrize_few

LIMIT_S = scaled(10.0)
BEFORE = [TimerRang(1.0, float(number)) for number in range(3)]


class Interruption(BaseException):
    """What a signal handler raises."""


class RaiseAt:
    """Raises at one bytecode of what is called, counted from 1; `has_raised` says whether there were so many."""

    def __init__(self, count):
        self.has_raised = False
        self._left = count

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *about):
        sys.settrace(None)
        return self.has_raised

    def _trace(self, frame, event, arg):
        if frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.has_raised:
            self._left -= 1
            if self._left == 0:
                self.has_raised = True
                raise Interruption
        return self._trace


def interrupted(raising, act, log):
    """Act in a thread of its own: a trace that raises as a handler ends leaves its exception as handled in 3.11."""

    def within():
        with raising:
            act(log)

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()


def is_ended(log):
    """Close a log in a thread, and return whether that ends."""
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S)
    return not closing.is_alive()


ACTIONS = {
    "write": lambda log: log.write(BEFORE[0]),
    "settle": lambda log: log.settle(),
    "close": lambda log: log.close(),
}


@parametrize_few("name", ACTIONS, keep=1)
def test_the_log_is_closed_after_an_exception_at_any_bytecode(name, tmp_path):
    act = ACTIONS[name]
    for count in range(1, 10_000):
        path = tmp_path / str(count)
        log = EventLog(path)
        for record in BEFORE:
            log.write(record)
        raising = RaiseAt(count)
        interrupted(raising, act, log)
        assert is_ended(log), f"after an exception at bytecode {count}"
        lines = path.read_bytes().splitlines()
        assert len(lines) in {len(BEFORE), len(BEFORE) + (name == "write")}, count
        if not raising.has_raised:
            break
    assert count > 10
