"""Logging: what a script, a command and an embedding program see of paceline's loggers."""

import ast
import logging
import re
import sys
import threading
from pathlib import Path

import pytest

import paceline
import paceline as pl
from machine_speed import scaled
from paceline.cli import main
from paceline.cli.log_handler import is_quiet, logging_to_terminal, progress_console, set_verbosity
from paceline.core.records import WorkerJoined, WorkerLost
from paceline.processes.child_process import ProcessSettings
from paceline.recording.callbacks.progress_line import stderr_console
from paceline.run.run_log import RunLog
from paceline.utils.rank_logger import RankLogger
from rank_threads import ranks
from tiny_jobs import dataset, tiny_job

SOURCE = Path(paceline.__file__).parent


@pytest.fixture
def lines_of_a_script(monkeypatch, capsys):
    """Return the lines on standard error of a script that configures logging, loses worker 1 and gets it back."""
    loggers = logging.root, logging.getLogger("paceline")
    levels = [logger.level for logger in loggers]

    def lines(configure=lambda: None):
        with monkeypatch.context() as patch:
            for logger in loggers:
                patch.setattr(logger, "handlers", [])
            for logger, level in zip(loggers, (logging.WARNING, logging.NOTSET), strict=True):
                logger.setLevel(level)
            configure()
            log = RunLog(is_simulated=False)
            log.on_record(WorkerLost(now_s=1.0, worker=1, reason="killed by SIGKILL"))
            log.on_record(WorkerJoined(now_s=2.0, worker=1))
        return capsys.readouterr().err.splitlines()

    yield lines
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_a_script_without_logging_sees_warnings(lines_of_a_script):
    assert lines_of_a_script() == ["lost worker 1: killed by SIGKILL"]


def test_a_script_under_torchrun_sees_the_rank(lines_of_a_script, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert lines_of_a_script() == ["[rank 3] lost worker 1: killed by SIGKILL"]


def test_a_line_that_the_launcher_labels_has_no_second_label(lines_of_a_script, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PACELINE_LABELLED", "1")
    assert lines_of_a_script() == ["lost worker 1: killed by SIGKILL"]


@pytest.mark.parametrize("has_loops", [False, True])
def test_a_collective_in_a_loop_is_named_as_the_cause_of_silence(has_loops, caplog):
    log = RunLog(is_simulated=False, has_loops=has_loops)
    log.on_record(WorkerLost(now_s=1.0, worker=1, reason="worker 1: silent for 10 s", silent=True))
    log.on_record(WorkerLost(now_s=2.0, worker=2, reason="killed by SIGKILL"))
    assert ["as dist.all_reduce(loss), is a likely cause" in each for each in caplog.messages] == [has_loops, False]


@pytest.mark.parametrize(
    "configure",
    [
        lambda: logging.getLogger("paceline").setLevel(logging.CRITICAL),
        lambda: logging.getLogger("paceline").addHandler(logging.NullHandler()),
    ],
    ids=["level", "handler"],
)
def test_a_program_that_embeds_paceline_can_silence_it(lines_of_a_script, configure):
    assert lines_of_a_script(configure) == []


def test_a_program_that_embeds_paceline_chooses_level_and_format(lines_of_a_script):
    def configure():
        logging.basicConfig(format="%(levelname)s %(name)s %(rank)s %(message)s", level="INFO")

    assert lines_of_a_script(configure) == [
        "WARNING paceline.run.run_log None lost worker 1: killed by SIGKILL",
        "INFO paceline.run.run_log None worker 1 joined",
    ]


def test_a_child_process_has_the_level_of_this_one(monkeypatch):
    log = logging.getLogger("paceline")
    monkeypatch.setattr(log, "level", logging.CRITICAL)
    settings = ProcessSettings.capture()
    monkeypatch.setattr(log, "level", logging.NOTSET)
    settings.apply()
    assert log.level == logging.CRITICAL


def test_a_simulated_worker_loss_is_logged_as_information(caplog):
    caplog.set_level(logging.INFO, "paceline")
    cluster = paceline.Cluster(2, faults=[paceline.Fault(worker=1, draw=2, kind="die")])
    paceline.train(tiny_job(), protocol="asp", cluster=cluster, stop="updates=5")
    lost = [record for record in caplog.records if record.getMessage().startswith("lost worker 1: ")]
    assert [record.levelname for record in lost] == ["INFO"]


@pytest.mark.parametrize(("rank", "message"), [("2", "[rank 2] hello"), ("", "hello"), ("x", "hello")])
def test_a_record_has_the_rank(monkeypatch, caplog, rank, message):
    monkeypatch.setenv("RANK", rank)
    RankLogger("paceline.test").warning("%s", "hello", extra={"step": 3})
    [record] = caplog.records
    assert (record.getMessage(), record.rank, record.step) == (message, 2 if rank == "2" else None, 3)


def test_the_command_line_handler_writes_one_line_a_record_and_is_removed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    handlers, level = [*logging.getLogger("paceline").handlers], logging.getLogger("paceline").level
    with logging_to_terminal():
        RankLogger("paceline.test").info("a detail")
        RankLogger("paceline.test").warning("lost worker %d: %s", 3, "[bold]" + "no answer " * 20)
        assert stderr_console() is logging.getLogger("paceline").handlers[-1].console
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING lost worker 3: \[bold\](no answer )+", line + " " * (line[-1] != " "))
    assert ([*logging.getLogger("paceline").handlers], logging.getLogger("paceline").level) == (handlers, level)


@pytest.mark.parametrize(
    ("options", "shown"),
    [({}, ["WARNING", "ERROR"]), ({"verbose": True}, ["INFO", "WARNING", "ERROR"]), ({"quiet": True}, ["ERROR"])],
)
def test_verbosity(capsys, options, shown):
    with logging_to_terminal():
        set_verbosity(**options)
        for level in ("debug", "info", "warning", "error"):
            getattr(RankLogger("paceline.test"), level)("hello")
        assert is_quiet() == ("quiet" in options)
        assert progress_console().quiet == is_quiet()
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == shown


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0


def test_the_options_of_the_program_come_before_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    train = [
        "train",
        "digits",
        "--protocol",
        "bsp",
        "--cluster",
        "2*exp(mean=1)",
        "--stop",
        "updates=2",
        "--out",
        "run",
    ]
    assert command(monkeypatch, "--quiet", *train) == 0
    assert capsys.readouterr().err == ""
    assert command(monkeypatch, "--verbose", *train, "--overwrite") == 0
    assert "INFO the run ended: 2 updates made" in capsys.readouterr().err
    assert command(monkeypatch, "--quiet", *train) == 2
    assert capsys.readouterr().err == "paceline: run exists already; give another folder, or --overwrite\n"


def test_commands_print_only_their_results():
    """Messages of a running process go to the log: print stands in the command line, in programs' output, and in the
    probe and the shares, which run inside programs of which the log is not paceline's.
    """
    found = []
    for path in SOURCE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "print" not in source:
            continue
        calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
        if any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls):
            found.append(path.relative_to(SOURCE).parts[0])
    assert set(found) == {"cli", "probe", "shares"}


class Evaluated(pl.callbacks.Callback):
    """Sets an event when the evaluator has done its first work."""

    def __init__(self):
        self.event = threading.Event()

    def on_evaluate(self, evaluation):
        self.event.set()


@pytest.fixture
def job():
    """Job whose evaluator has done its first work."""
    evaluated = Evaluated()
    more = {"protocol": "asp", "stop": "updates=1000000", "evaluate_every": "updates=1", "callbacks": [evaluated]}
    with ranks(2, tiny_job(eval_data=dataset(20)), **more) as job:
        job.start_all()
        assert evaluated.event.wait(scaled(20))
        yield job


def test_an_error_of_the_evaluator_names_it(job):
    job.processes[0].kill()
    with pytest.raises(pl.RunError, match=r"^the evaluator: rank 0 is gone: "):
        job.end("beside")


def test_an_evaluator_that_leaves_is_not_called_a_worker(job, caplog):
    job.processes["beside"].leave("SIGTERM")
    job.join("beside")
    with pytest.raises(pl.RunError, match="the process that evaluates ended"):
        job.end(0)
    assert "the evaluator leaves the run: SIGTERM" in caplog.text
