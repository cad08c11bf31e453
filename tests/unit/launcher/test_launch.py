"""Ranks of `paceline run` as processes: shell scripts, which start in a millisecond."""

import io
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.clusters.launch_settings import LaunchSettings
from paceline.clusters.launch_supervisor import LaunchSupervisor
from paceline.launcher import launch_store, rank_process
from paceline.launcher.caught_signals import CaughtSignals
from paceline.launcher.launch import Launch, launch
from paceline.launcher.output import RankOutput
from selections import parametrize_few

FIRST = '[ "$TORCHELASTIC_RESTART_COUNT" = 0 ]'


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(script, ranks=2, *words, max_restarts=-1, log_dir=None, **settings):
    """Run a shell script as ranks, without pauses, and return the exit status."""
    given = {"nnodes": 1, "node_rank": 0, "master": "127.0.0.1", "port": 0, "token": "a token", **settings}
    command = ["/bin/sh", "-c", script, "script", *words]
    return launch(
        LaunchSettings(nproc_per_node=ranks, max_restarts=max_restarts, **given), command, log_dir, first_pause_s=0.0
    )


def lines(capfd):
    return sorted(capfd.readouterr().out.splitlines())


def test_ranks_have_the_variables_of_torchrun(capfd):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE"
    values = " ".join(f"${name}" for name in names.split())
    assert run(f"echo {values} $MASTER_ADDR $PACELINE_TOKEN $OMP_NUM_THREADS", ranks=2) == 0
    assert lines(capfd) == [f"[rank {rank}] {rank} {rank} 2 2 0 1 {rank} 2 127.0.0.1 a token 1" for rank in range(2)]


def test_ranks_of_a_second_host_are_numbered_after_those_of_the_first(capfd):
    settings = {"nnodes": 2, "node_rank": 1, "master": "10.0.0.1", "port": 29400}
    assert run("echo $RANK $LOCAL_RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT", ranks=2, **settings) == 0
    assert lines(capfd) == ["[rank 2] 2 0 4 1 10.0.0.1 29400", "[rank 3] 3 1 4 1 10.0.0.1 29400"]


def test_arguments_reach_the_ranks_unchanged(capfd):
    assert run('for each in "$@"; do echo "<$each>"; done', 1, "two words", "", "--nnodes") == 0
    assert capfd.readouterr().out.splitlines() == ["<two words>", "<>", "<--nnodes>"]


def test_a_rank_that_is_killed_comes_back_and_the_other_one_has_lived_on(capfd):
    os.mkfifo("back")
    script = f"""
        if [ $RANK = 0 ]; then read line <back; echo "$line"
        elif {FIRST}; then kill -9 $$
        else echo "rank 1 is back" >back; fi
    """
    assert run(script) == 0
    assert lines(capfd) == ["[rank 0] rank 1 is back"]


def test_when_rank_0_is_killed_all_are_started_again(capfd):
    for rank in (1, 2):
        os.mkfifo(f"started-{rank}")
    script = f"""
        echo "start $TORCHELASTIC_RESTART_COUNT"
        if {FIRST}; then
            if [ $RANK = 0 ]; then read one <started-1; read other <started-2; kill -9 $$; fi
            echo "started" >started-$RANK; exec sleep 1000
        fi
    """
    assert run(script, ranks=3) == 0
    assert lines(capfd) == sorted(f"[rank {rank}] start {count}" for rank in range(3) for count in range(2))


def test_the_status_of_a_script_that_fails_is_that_of_the_launcher():
    assert run("if [ $RANK = 1 ]; then exit 7; else exec sleep 1000; fi", max_restarts=0) == 7
    assert run("echo start >>starts; exit 7", ranks=1) == 7
    with open("starts") as file:
        assert len(file.readlines()) == 3


@parametrize_few("number", [signal.SIGINT, signal.SIGTERM], keep=1)
def test_a_signal_is_passed_on_and_the_launcher_ends_with_the_status_of_rank_0(number):
    name = number.name.removeprefix("SIG")
    script = f"""
        trap 'kill $!; exit 4' {name}
        sleep 1000 &
        touch ready.$RANK
        if [ $RANK = 0 ]; then
            while [ ! -e ready.1 ]; do sleep 0.01; done
            kill -{name} $PPID
        fi
        wait
    """
    assert run(script) == 4


@parametrize_few(("name", "told"), [("INT", ["told"]), ("TERM", [])], keep=1)
def test_ctrl_c_alone_reaches_what_a_rank_has_started(name, told, capfd):
    child = f"trap 'echo told; exit' INT TERM; kill -{name} $PPID; for each in 1 2 3 4 5 6 7 8 9; do sleep 0.05; done"
    assert run(f'trap : INT TERM; /bin/sh -c "{child}"; exit 4', ranks=1) == 4
    assert capfd.readouterr().out.splitlines() == told


def test_signals_of_a_scheduler_reach_the_script_and_end_nothing():
    script = """
        trap 'echo USR1 >>got; kill -USR2 $PPID' USR1
        trap 'exit 5' USR2
        kill -USR1 $PPID
        while :; do sleep 0.02; done
    """
    assert run(script, ranks=1, max_restarts=0) == 5
    assert Path("got").read_text() == "USR1\n"


def test_a_second_signal_kills_the_ranks_that_do_not_end():
    script = """
        trap 'kill -INT $PPID' TERM
        if [ $RANK = 0 ]; then kill -TERM $PPID; fi
        while :; do sleep 1000 & wait; done
    """
    assert run(script, ranks=1) == 130


def is_there(pid):
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Twice in a new session, so that neither is a child or in the group of its rank.
DAEMON = "setsid setsid sh -c 'trap \"{trap}\" TERM; echo $$ >daemon; while :; do sleep 0.02; done' <&- >&- 2>&- &"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the launcher become the parent of a daemon")
@parametrize_few(("end", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $PPID; exec sleep 1000", 143)], keep=1)
def test_a_daemon_of_a_rank_ends_with_the_run(end, status, caplog):
    script = f"{DAEMON.format(trap='exit')} while [ ! -s daemon ]; do sleep 0.01; done; {end}"
    assert run(script, ranks=1, max_restarts=0) == status
    daemon = int(Path("daemon").read_text())
    assert not is_there(daemon)
    assert re.search(rf"left as daemons ends with the run: process ids? .*\b{daemon}\b", caplog.text)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the launcher become the parent of a daemon")
def test_a_daemon_that_does_not_end_is_killed_after_a_time(monkeypatch):
    monkeypatch.setattr(rank_process, "END_TIMEOUT_S", 0.1)
    assert run(f"{DAEMON.format(trap='')} while [ ! -s daemon ]; do sleep 0.01; done", ranks=1) == 0
    assert not is_there(int(Path("daemon").read_text()))


def test_what_a_lost_rank_has_started_ends_with_it(monkeypatch):
    monkeypatch.setattr(rank_process, "END_TIMEOUT_S", 0.0)
    assert run("sleep 1000 & echo $! >child; exit 3", ranks=1, max_restarts=0) == 3
    with open("child") as file, pytest.raises(ProcessLookupError):
        os.kill(int(file.read()), 0)


def test_each_rank_has_a_file_and_the_terminal_shows_the_first(tmp_path, capfd):
    assert run("echo out $RANK; echo err $RANK >&2", log_dir=tmp_path) == 0
    for rank in range(2):
        written = (tmp_path / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(written) == [f"err {rank}", f"out {rank}"]
    shown = capfd.readouterr()
    # A store of another test may still write to this process's standard error, from a thread of torch.
    assert shown.out == "out 0\n"
    assert re.findall("^err .*$", shown.err, re.MULTILINE) == ["err 0"]


@pytest.mark.parametrize("make", [lambda log, home: log.symlink_to(home), lambda log, home: os.mkfifo(log)])
def test_an_output_file_that_is_a_link_or_a_pipe_is_refused(make, tmp_path):
    home = tmp_path / "home"
    home.write_text("precious")
    (tmp_path / "logs").mkdir()
    make(tmp_path / "logs" / "rank-1.log", home)
    with pytest.raises(OSError, match=r"link|pipe|No such device"):
        run("echo stolen", log_dir=tmp_path / "logs")
    assert home.read_text() == "precious"


def test_what_a_rank_prints_before_its_end_comes_before_the_message_about_it(capfd, caplog):
    assert run("if [ $RANK = 1 ]; then exec sleep 1000; fi; printf 'without a line end'; exit 2") == 2
    assert "[rank 0] without a line end\n" in capfd.readouterr().out


def test_a_rank_that_prints_without_end_does_not_keep_signals_from_the_launcher(capfd):
    os.mkfifo("prints")
    script = """
        if [ $RANK = 1 ]; then yes | head -n 100000; echo "much" >prints; exec yes; fi
        read much <prints; kill -TERM $PPID; exec sleep 1000
    """
    assert run(script) == 143
    assert capfd.readouterr().out.startswith("[rank 1] y\n")


def test_a_reader_that_goes_away_ends_the_run(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(closed))
        assert run("trap 'exit 5' TERM; while :; do echo line; done") == 5


@pytest.mark.timeout(20)
def test_signals_are_not_late_while_the_store_begins(monkeypatch):
    begins = threading.Event()

    def serve(listener):
        begins.wait()
        listener.close()

    monkeypatch.setattr(launch_store, "_serve", serve)
    settings = LaunchSettings(
        nproc_per_node=1, nnodes=2, node_rank=0, master="127.0.0.1", port=0, max_restarts=-1, token="a token"
    )
    supervisor = LaunchSupervisor(settings.ranks, settings.max_restarts)
    with CaughtSignals() as signals, launch_store.LaunchStore(settings) as store:
        store.begin()
        launched = Launch(settings, [], supervisor, store, RankOutput(settings, None, print), signals)
        try:
            launched._handle(time.monotonic())
        finally:
            begins.set()
            launched.close()
