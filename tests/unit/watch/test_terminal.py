import io
import os
import time
from unittest.mock import Mock

import pytest
from rich.console import Console

import paceline as pl
from paceline.cli import main
from paceline.core.records import DecisionMade, MemoryShared, WorkerJoined, WorkerLost
from paceline.errors import UsageError
from paceline.recording.run_folder import EVENTS
from paceline.watch.terminal import shown, watch_in_terminal
from paceline.watch.watcher import Watcher
from selections import parametrize_few
from written_runs import arrival, begun, ended, train_run, two_updates, update, write_run


def printed(folder, width=80):
    """Return the lines that a pipe gets."""
    file = io.StringIO()
    watch_in_terminal(folder, Console(file=file, width=width, highlight=False))
    return file.getvalue().splitlines()


@pytest.fixture(scope="module")
def slow_worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    cluster = pl.Cluster(4, (*[pl.timing.Deterministic(1.0)] * 3, pl.timing.Deterministic(4.0)))
    train_run(folder, "k_sync(k=3)", updates=30, cluster=cluster)
    return folder


@parametrize_few("width", [60, 80, 132], keep=1)
def test_no_line_is_wider_than_the_terminal(slow_worker, width):
    assert max(map(len, printed(slow_worker, width))) <= width


def test_the_view_has_progress_workers_stragglers_and_decisions(slow_worker):
    text = "\n".join(printed(slow_worker))
    assert "30 updates in 30 s, loss " in text
    assert "ended: 30 updates made" in text
    for name in ("loss ", "k ", "staleness ", "eval accuracy ", "worker time: computing "):
        assert f"\n{name}" in text
    assert "! worker 3 was at least" not in text  # 1 s is all that is known of its tasks
    assert "! worker 3 was not slower" in text or "! worker 3 was interrupted" in text
    assert "update 30: k = 3, quorum of 3 reached" in text
    assert "protocol: k_sync(k=3): the run begins" in text


def test_the_row_of_a_worker(tmp_path):
    records = [begun(), arrival(0, 1, 0.0, 1.0), arrival(1, 1, 0.0, 2.0), update(1, 2.0)]
    records += [arrival(0, 2, 2.0, 3.0, used=False, reason="stale"), ended(3.0, 6.0)]
    write_run(tmp_path / "run", records)
    [row] = [line.split() for line in printed(tmp_path / "run") if line.lstrip().startswith("0 ")]
    assert row == ["0", "1", "s", "1", "s", "2", "1", "0", "s", "ago", "ud"]
    assert "gradients received 36 B, versions sent 36 B" in "\n".join(printed(tmp_path / "run"))


def test_what_is_in_shared_memory_is_not_sent(tmp_path):
    records = [begun(), arrival(0, 1, 0.0, 1.0), arrival(1, 1, 0.0, 2.0), update(1, 2.0), ended(3.0, 6.0)]
    records[1:1] = [MemoryShared(now_s=0.0, worker=1, event_s=0.0)]
    write_run(tmp_path / "run", records)
    text = "\n".join(printed(tmp_path / "run", width=100))
    assert "1 of 2 workers shared memory with the server" in text
    assert "gradients received" not in text


def test_a_notice_is_no_gradient_that_was_received(tmp_path):
    records = [begun(), arrival(0, 1, 0.0, 1.0), arrival(1, 1, 0.0, 2.0), update(1, 2.0)]
    records += [arrival(0, 2, 2.0, 3.0, used=False, reason="too stale", unsent_s=0.1), ended(3.0, 6.0)]
    write_run(tmp_path / "run", records)
    assert "gradients received 24 B, versions sent 36 B" in "\n".join(printed(tmp_path / "run"))


def test_workers_that_were_lost_are_named_with_their_hazard(tmp_path):
    gone = [
        WorkerLost(now_s=10.0, worker=1, reason="gone"),
        WorkerJoined(now_s=20.0, worker=1),
        WorkerLost(now_s=1000.0, worker=1, reason="gone"),
    ]
    write_run(tmp_path / "run", [begun(), arrival(0, 1, 0.0, 1.0), update(1, 1.0, k=1), *gone, ended(3600.0, 4600.0)])
    [line] = [line for line in printed(tmp_path / "run") if line.startswith("! ")]
    assert line.startswith("! worker 1 was lost 2 times; expected in an hour: ")


def test_of_many_workers_the_slowest_are_shown_on_a_low_terminal(tmp_path):
    records = [begun(40), *[arrival(worker, 1, 0.0, 1.0 + worker) for worker in range(40)]]
    write_run(tmp_path / "run", [*records, update(1, 41.0, k=40), ended(41.0, 99.0)])
    watcher = Watcher(tmp_path / "run")
    watcher.poll()
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=26)
    console.print(shown(watcher, console))
    text = console.file.getvalue()
    assert "the slowest 9 of 40 workers" in text
    assert len(text.splitlines()) <= 26


def test_the_view_on_a_terminal_ends_with_the_run(tmp_path):
    write_run(tmp_path / "run", two_updates())
    file = io.StringIO()
    assert not watch_in_terminal(tmp_path / "run", Console(file=file, force_terminal=True, width=80))
    assert "ended: updates made" in file.getvalue()


@pytest.fixture
def killed(tmp_path):
    """Function that returns the folder of a killed run whose last record is some seconds old."""

    def folder(age_s, **configuration):
        write_run(tmp_path / "run", two_updates()[:-1], **configuration)
        written_s = time.time() - age_s
        os.utime(tmp_path / "run" / EVENTS, (written_s, written_s))
        return tmp_path / "run"

    return folder


@parametrize_few(
    ("has_standby", "condition"), [(False, ""), (True, ", if its standby has not gone on with it")], keep=1
)
def test_the_view_on_a_terminal_gives_up_a_killed_run(killed, has_standby, condition, monkeypatch, capsys):
    folder = killed(age_s=40, has_standby=has_standby)
    monkeypatch.setattr("sys.argv", ["paceline", "watch", str(folder)])
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    with pytest.raises(SystemExit, match="1"):
        main()
    printed = capsys.readouterr()
    assert "stopped without an end: no process of this host writes to the folder" in printed.out
    error = "paceline: the run has stopped without an end; to continue it"
    assert " ".join(printed.err.split()) == f"{error}{condition}: paceline train --resume {folder}"


def test_the_view_on_a_terminal_waits_for_a_restart(killed, monkeypatch):
    folder = killed(age_s=10)
    monkeypatch.setattr("paceline.watch.terminal.time", Mock(sleep=Mock(side_effect=[None, None, KeyboardInterrupt])))
    with pytest.raises(KeyboardInterrupt):
        watch_in_terminal(folder, Console(file=io.StringIO(), force_terminal=True, width=80))


def test_a_log_that_no_run_writes_is_an_error(tmp_path):
    write_run(tmp_path / "run", [begun(), DecisionMade(now_s=0.0, kind="learning_rate", reason="", numbers={})])
    with pytest.raises(UsageError, match=r"run holds what no run writes \(KeyError: 'scale'\)"):
        printed(tmp_path / "run")


def test_a_run_without_updates_is_shown(tmp_path):
    write_run(tmp_path / "run", [begun(), DecisionMade(now_s=0.0, kind="protocol", reason="bsp: the run begins")])
    assert "no update yet" in "\n".join(printed(tmp_path / "run"))
