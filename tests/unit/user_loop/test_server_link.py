"""What rank 0 learns of its server while it waits for a task: a failure, and an end before it has taken part."""

import pytest

import paceline as pl
from paceline.engines.distributed import End
from paceline.user_loop.run_end import raise_end
from paceline.user_loop.server.server_link import ServerLink
from paceline.user_loop.worker.exchange import Exchange, LoopEnd

LOST = End("interrupted", "interrupted by Ctrl-C")


class Ended:
    """Process of a server whose run has ended."""

    def __init__(self, end, error=None):
        self.end = end
        self._error = error

    def check(self, timeout_s=0.0):
        if self._error is not None:
            raise self._error


def test_an_end_before_this_rank_takes_part_ends_its_wait(monkeypatch):
    monkeypatch.setattr("paceline.user_loop.worker.exchange.CHECK_S", 0.01)
    link = ServerLink(Ended(LOST))
    assert Exchange().message(lambda: link.look(has_begun=False)) == LoopEnd(None, LOST)


def test_a_rank_that_takes_part_waits_for_the_last_version():
    assert ServerLink(Ended(LOST)).look(has_begun=True) is None


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_error_of_the_server_ends_every_wait(has_begun):
    error = pl.UsageError("the coordinator: run exists already")
    assert ServerLink(Ended(None, error)).look(has_begun=has_begun) is error


@pytest.mark.parametrize(
    ("end", "returns", "expected"),
    [
        (LOST, False, SystemExit),
        (LOST, True, None),
        (End("not_finite", "no"), False, pl.RunError),
        (End("diverged", "no"), True, None),
        (End("no_workers", "no"), False, pl.RunError),
        (End("failed", "no"), True, pl.RunError),
        (End("failed", "no", is_usage=True), True, pl.UsageError),
        (End("stopped", "run.stop() at rank 0"), False, None),
        (End("epochs", "3 epochs"), False, None),
    ],
)
def test_what_the_end_of_a_run_raises(end, returns, expected, monkeypatch):
    monkeypatch.setattr("paceline.user_loop.run_end._tells", lambda config: False)
    if expected is None:
        raise_end(end, "the server", None, returns=returns)
        return
    with pytest.raises(expected):
        raise_end(end, "the server", None, returns=returns)
