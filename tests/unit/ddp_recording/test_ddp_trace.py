"""Replay of DDP recordings as traces."""

import numpy as np
import pytest

import paceline as pl
from ddp_recordings import write_recording
from paceline.clusters.parser import parse_cluster
from paceline.ddp_recording.as_trace import read_trace_of, trace_of
from paceline.ddp_recording.recording import DDPRecording
from paceline.errors import UsageError

STEPS = 30


@pytest.fixture
def folder(tmp_path):
    work_ms = np.full((3, STEPS), 100.0)
    work_ms[2] = 200.0
    return write_recording(tmp_path / "rec", work_ms, sum_ms=6.0)


@pytest.mark.parametrize(
    ("protocol", "update_s"),
    [("bsp", 0.206), ("all_reduce", 0.206), ("k_sync(k=2)", 0.106)],
)
def test_a_recording_is_a_cluster_for_protocols_with_and_without_a_server(protocol, update_s, folder):
    simulated = pl.simulate(protocol, f"trace:{folder}", updates=STEPS)
    assert simulated.seconds_per_update == pytest.approx(update_s, rel=1e-6)


def test_ranks_can_be_left_out(folder):
    trace = trace_of(DDPRecording(folder), without=[2])
    simulated = pl.simulate("bsp", pl.Cluster(2, trace), updates=STEPS)
    assert simulated.seconds_per_update == pytest.approx(0.106, rel=1e-6)


def test_the_options_of_a_trace_apply_to_a_recording(folder):
    assert parse_cluster(f"trace(file={folder}, by=time)").timing.by == "time"
    assert parse_cluster(f"trace:{folder}", censored="km").timing.censored == "km"


def test_a_trace_file_of_a_recording_is_that_of_a_run_without_a_server(folder, tmp_path):
    read_trace_of(folder).to_csv(tmp_path / "trace.csv")
    assert pl.timing.Trace.from_csv(tmp_path / "trace.csv").rows == read_trace_of(folder).rows
    with pytest.raises(UsageError, match="has the times of the sums of a run without a server"):
        pl.simulate("bsp", f"trace:{tmp_path / 'trace.csv'}", updates=3)
