"""Texts of workers: they are short and printable where they enter, and a log with a long line stays readable."""

import time

import pytest

import paceline as pl
from altered_messages import altered
from paceline.cli.flags import in_flags
from paceline.core.records import WorkerLost
from paceline.engines.distributed.rendezvous.handshake import why_rejected
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import MOST_OF_PEER_BYTES
from paceline.engines.distributed.transport.messages import LONGEST_SENT
from paceline.engines.distributed.transport.sum_messages import StepReport
from paceline.engines.distributed.transport.task_messages import RemoteTaskDone
from paceline.errors import RunError
from paceline.recording.event_log import to_line, to_record
from paceline.recording.validation import configuration
from paceline.report.write import write_report
from paceline.utils.files import MOST_LINE_BYTES, ContentError
from paceline.utils.wording import printable
from rank_threads import ranks
from ranks import lost
from selections import parametrize_few
from tiny_jobs import tiny_job

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def test_an_honest_process_sends_its_whole_error_up_to_a_bound():
    assert messages.Failed.of(ValueError("x" * 200_000)).whole == "ValueError: " + "x" * 200_000
    longest = messages.Failed.of(ValueError("\U0001f600" * 1_200_000))
    assert len(longest.whole) == LONGEST_SENT
    assert len(longest.message) == messages.LONGEST_TEXT
    content, _ = messages.encode(longest)
    assert len(content) <= MOST_OF_PEER_BYTES
    assert messages.decode(content, of_peer=True) == longest
    content, _ = messages.encode(messages.Failed.of(ValueError("caf\udce9" * LONGEST_SENT)))
    assert messages.decode(content).whole.startswith("ValueError: caf\\udce9")


TEXTS = {"long": "x" * 200_000, "escape sequences": ESCAPE, "long escape sequences": ESCAPE * 1000}


@parametrize_few("text", TEXTS.values(), ids=TEXTS, keep=1)
def test_the_error_of_a_worker_is_short_and_printable(text, tmp_path, caplog):
    def change(fields):
        fields[:] = ["Failed", f"ValueError: {text}", False]

    folder = tmp_path / "run"
    settings = {"protocol": "bsp", "stop": "updates=12", "out": folder}
    with ranks(3, tiny_job(), **settings) as job, altered(1, RemoteTaskDone, change, after=2):
        job.start_workers()
        end = job.serve()
        with pytest.raises(RunError, match="rank 0 is gone"):
            job.end(1)
    [(_, reason)] = lost(end)
    assert reason.startswith("ValueError: ")
    assert len(reason) <= messages.LONGEST_TEXT
    for shown in (reason, caplog.text):
        assert not set(shown) & set("\x1b\x07\x9b")
    assert pl.replay(folder).difference == ""
    assert write_report([folder], tmp_path / "report.html").exists()


SERVED, SUMMED = {"protocol": "asp"}, {"protocol": "all_reduce", "torchrun": {"min_workers": 1}}


@parametrize_few("settings", [SERVED, SUMMED], ids=["server", "no server"], keep=1)
def test_the_whole_error_of_a_worker_is_in_a_file_that_the_log_names(settings, tmp_path, caplog):
    def change(fields):
        fields[:] = ["Failed", f"ValueError: {ESCAPE}{'x' * 200_000}", False]

    kind = StepReport if settings is SUMMED else RemoteTaskDone
    folder = tmp_path / "run"
    with ranks(3, tiny_job(), stop="updates=12", out=folder, **settings) as job, altered(1, kind, change, after=2):
        job.start_workers()
        end = job.serve()
        with pytest.raises(RunError, match="rank 0 is gone"):
            job.end(1)
    [(_, reason)] = lost(end)
    [path] = (folder / "errors").iterdir()
    assert f"(the whole text is in {path})" in reason
    assert str(path) in caplog.text
    assert path.read_text(encoding="utf-8") == f"ValueError: {printable(ESCAPE)}{'x' * 200_000}"
    assert pl.replay(folder).difference == ""


def test_the_settings_of_a_rejected_process_are_shown_without_control_characters():
    hello = messages.Hello.of("worker 1", 1, {"seed": ESCAPE, ESCAPE: {"x": ESCAPE}})
    reason = why_rejected(hello, {"seed": 1}, 3)
    assert reason.startswith("worker 1 differs from rank 0: seed 1, now \\x1b]0;owned\\x07")
    assert not set(reason) & set("\x1b\x07\x9b")


def test_a_record_with_a_long_text_is_a_line_that_readers_take():
    record = WorkerLost(now_s=1.0, worker=2, reason="ü" * MOST_LINE_BYTES)
    line = to_line(record)
    assert len(line) < MOST_LINE_BYTES
    assert to_record(line).reason.endswith("üüü...")


def test_flags_of_a_long_text_take_no_time():
    begun_s = time.process_time()
    for text in ("a.b " * 5000, "x" * 20_000, "a(" * 10_000, "'" * 20_000, "'\\" * 10_000):
        assert in_flags(f"out=1 {text}", {"out": "--out"}) == f"--out 1 {text}"
    assert time.process_time() - begun_s < 0.5  # 0.05; 2.5 while the time grew with the square of the length


def test_control_characters_of_a_folder_do_not_reach_the_terminal():
    record = to_record(to_line(WorkerLost(now_s=1.0, worker=2, reason=f"failed {ESCAPE}\u202e")))
    assert record.reason == "failed \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e"
    with pytest.raises(ContentError, match=r"job is '.*x1b.*, expected text without control characters"):
        configuration({"job": f"digits{ESCAPE}"}, "run.json")
