"""Reports of DDP recordings."""

import numpy as np
import pytest

from ddp_recordings import write_recording
from paceline.ddp_recording.recording import DDPRecording
from paceline.ddp_recording.waiting import time_shares
from paceline.recording.event_log import to_line
from paceline.recording.recorded_ddp_run import RecordedDDPRun
from paceline.recording.validation import RecordOrder, check_types
from paceline.report.worker_stats import activities
from paceline.report.write import read_runs, write_report

STEPS = 20


@pytest.fixture
def folder(tmp_path):
    work_ms = np.full((3, STEPS), 100.0)
    work_ms[2] = 200.0
    samples = [[(0, 2.0, 3.0, 1.0), (10, 1.0, 4.0, 2.0)]] * 3
    return write_recording(tmp_path / "rec", work_ms, sum_ms=6.0, gradients=samples)


def test_the_records_are_those_of_a_run(folder):
    order = RecordOrder()
    records = list(RecordedDDPRun(folder).history)
    for record in records:
        order.check(record)
        check_types(record)
        assert to_line(record)
    assert len(records) == STEPS * (3 + 1) + 2


def test_a_report_is_written_to_the_folder_of_the_recording(folder):
    page = write_report([folder]).read_text()
    assert "DDP recording with DDP: the recording ends with 20 steps after 4.12 s" in page
    assert "32.4% of the rank-time was waiting for slower ranks" in page
    assert "rank 2 on alpha is slow in 100.0% of the steps" in page


def test_its_use_of_time_is_that_of_the_advice(folder):
    [run] = read_runs([folder])
    shares = time_shares(DDPRecording(folder))
    assert activities(run) == pytest.approx(
        {"computing": shares.working_s, "communicating": shares.summing_s, "waiting": shares.waiting_s}
    )


def test_losses_between_samples_are_interpolated(folder):
    losses = RecordedDDPRun(folder).history.columns()["loss"]
    assert losses == pytest.approx([max(1.0, 2.0 - step / 10) for step in range(2, STEPS + 2)])


def test_a_recording_without_samples_has_a_report_too(tmp_path):
    folder = write_recording(tmp_path / "rec", np.full((2, STEPS), 100.0))
    assert "the recording ends with 20 steps" in write_report([folder]).read_text()
