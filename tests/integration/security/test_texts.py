"""Texts of workers: they are short and printable where they enter, and a log with a long line stays readable."""

import time

import pytest

import paceline as pl
from altered_messages import altered
from paceline.cli.flags import in_flags
from paceline.core.records import WorkerLost
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.task_messages import RemoteTaskDone
from paceline.errors import RunError
from paceline.recording.event_log import to_line, to_record
from paceline.recording.validation import configuration
from paceline.report.write import write_report
from paceline.utils.files import MOST_LINE_BYTES, ContentError
from rank_threads import ranks
from ranks import lost
from tiny_jobs import tiny_job

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"


def test_an_honest_process_shortens_its_error():
    sent = messages.Failed.of(ValueError("x" * 1_200_000))
    assert len(sent.message) == messages.LONGEST_TEXT
    assert sent.message.endswith("xxx...")


@pytest.mark.parametrize("text", ["x" * 200_000, ESCAPE], ids=["long", "escape sequences"])
def test_the_error_of_a_worker_is_short_and_printable(text, tmp_path, caplog):
    def change(fields):
        fields[:] = ["Failed", f"ValueError: {text}", False]

    folder = tmp_path / "run"
    settings = {"protocol": "asp", "stop": "updates=12", "out": folder}
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


def test_a_record_with_a_long_text_is_a_line_that_readers_take():
    record = WorkerLost(1.0, 2, "ü" * MOST_LINE_BYTES)
    line = to_line(record)
    assert len(line) < MOST_LINE_BYTES
    assert to_record(line).reason.endswith("üüü...")


def test_flags_of_a_long_text_take_no_time():
    begun_s = time.process_time()
    for text in ("a.b " * 5000, "x" * 20_000, "a(" * 10_000, "'" * 20_000):
        assert in_flags(f"out=1 {text}", {"out": "--out"}) == f"--out 1 {text}"
    assert time.process_time() - begun_s < 2.0


def test_control_characters_of_a_folder_do_not_reach_the_terminal():
    record = to_record(to_line(WorkerLost(1.0, 2, f"failed {ESCAPE}\u202e")))
    assert record.reason == "failed \\x1b]0;owned\\x07\\x1b[2J\\x9b31m\\u202e"
    with pytest.raises(ContentError, match=r"job is '.*x1b.*, expected text without control characters"):
        configuration({"job": f"digits{ESCAPE}"}, "run.json")
