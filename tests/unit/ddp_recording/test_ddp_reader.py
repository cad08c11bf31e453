"""Reading of DDP recordings, whole ones and damaged ones."""

import json
import re
import shutil

import numpy as np
import pytest

from ddp_recordings import MODEL, describe, rewrite, write_recording
from paceline.ddp_recording import layout
from paceline.ddp_recording.recording import WARM_UP, DDPRecording, is_recording
from paceline.errors import UsageError
from paceline.probe.rank_files import RankFiles


@pytest.fixture
def folder(tmp_path):
    work_ms = np.full((3, 20), 50.0)
    work_ms[1] = 80.0
    return write_recording(tmp_path / "rec", work_ms)


def message(folder):
    with pytest.raises(UsageError) as caught:
        DDPRecording(folder)
    return str(caught.value)


def test_the_parts_are_read_in_seconds_without_the_first_two_steps(folder):
    recording = DDPRecording(folder)
    assert (recording.ranks, recording.steps, recording.payload_bytes) == (3, 20, MODEL["payload_bytes"])
    assert recording.work_s == pytest.approx(np.repeat([[0.05], [0.08], [0.05]], 20, axis=1))
    assert recording.sum_s == pytest.approx(np.full(20, 0.005))
    assert recording.step_s == pytest.approx(np.full((3, 20), 0.085))
    assert recording.part_s("backward")[1] == pytest.approx(np.full(20, 0.078))


def test_the_last_line_of_a_killed_rank_may_be_cut_off(folder):
    rewrite(folder, 2, lambda text: text[:-4])
    assert DDPRecording(folder).steps == 19


def test_only_steps_of_all_ranks_are_read(folder):
    rewrite(folder, 2, lambda text: "".join(text.splitlines(keepends=True)[:15]))
    rewrite(folder, 0, lambda text: re.sub(r"\n3,.*", "", text))
    assert DDPRecording(folder).steps == 11  # of 12 after the first two, one is missing


def test_a_row_of_a_device_stands_for_the_steps_before_it_too(tmp_path):
    write_recording(tmp_path, [[10.0, 20.0], [11.0, 21.0]])
    for rank in range(2):
        describe(tmp_path, rank, 0, world_size=2, host="alpha", steps_per_row=10)
        rows = layout.steps_file(layout.attempt_folder(tmp_path, 0), rank)
        head, *lines = rows.read_text().splitlines()
        lines = [f"{10 * i + 9},{line.partition(',')[2]}" for i, line in enumerate(lines)]
        rows.write_text("\n".join([head, *lines]) + "\n")
    recording = DDPRecording(tmp_path)
    assert recording.step_numbers.tolist() == list(range(WARM_UP, 40))
    assert recording.work_s[1] == pytest.approx([0.011] * (30 - WARM_UP) + [0.021] * 10)


@pytest.mark.parametrize(("steps", "read"), [(12, 20), (25, 25)])
def test_of_several_attempts_the_one_with_the_most_steps_is_read(steps, read, folder):
    write_recording(folder, np.full((3, steps), 20.0), attempt=1)
    recording = DDPRecording(folder)
    assert (recording.attempts, recording.steps) == (2, read)


def test_gradients_are_means_over_the_ranks(tmp_path):
    samples = [[(0, 2.0, 3.0, 1.0), (50, 1.0, 4.0, 2.0)], [(0, 4.0, 5.0, 1.0)]]
    recording = DDPRecording(write_recording(tmp_path, np.full((2, 20), 9.0), gradients=samples))
    assert recording.gradient_samples == [(0, 3.0, 4.0, 1.0)]


def test_a_gradient_that_is_not_finite_is_left_out(tmp_path):
    samples = [[(0, 2.0, float("inf"), 1.0), (50, 1.0, 4.0, 2.0)]] * 2
    recording = DDPRecording(write_recording(tmp_path, np.full((2, 20), 9.0), gradients=samples))
    assert [sample.step for sample in recording.gradient_samples] == [50]


def test_a_recording_is_recognized(folder, tmp_path):
    assert is_recording(folder)
    assert not is_recording(tmp_path)
    assert not is_recording(tmp_path / "none")


def test_a_folder_that_does_not_exist(tmp_path):
    assert message(tmp_path / "none").startswith(f"there is no folder {tmp_path}/none; expected one")


def test_another_folder(tmp_path):
    assert "is not the folder of a recording; expected one that `paceline record` has written" in message(tmp_path)


def test_a_recording_without_ranks(folder):
    shutil.rmtree(folder / "attempt-0")
    assert "no rank has imported torch" in message(folder)
    assert "RANK is set" in message(folder)


def test_half_a_recording(folder):
    layout.header_file(folder / "attempt-0", 1).unlink()
    found = message(folder)
    assert "has ranks 0 and 2 of 3; 1 missing: copy the folders" in found


def test_a_script_without_ddp(tmp_path):
    RankFiles(tmp_path / "attempt-0", 0, 50)
    assert "rank 0 made no DistributedDataParallel model" in message(tmp_path)


def test_a_single_rank(tmp_path):
    assert "has a single rank, which waits for no other" in message(write_recording(tmp_path, [[5.0] * 20]))


def test_three_steps(tmp_path):
    folder = write_recording(tmp_path, np.full((2, 3), 9.0))
    assert "has 3 steps that all ranks recorded after the first 2, expected at least 10; record a longer" in message(
        folder
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace("data_ns", "load_ns"), "its columns are"),
        (lambda text: text.replace("\n5,", "\nfive,"), "five"),
        (lambda text: re.sub(r"\n5,\d+", "\n5", text), "columns"),
    ],
)
def test_damaged_rows(folder, change, expected):
    rewrite(folder, 1, change)
    found = message(folder)
    assert found.startswith(f"cannot read {folder}/attempt-0/rank-1.csv: ")
    assert expected in found


def test_a_damaged_header(folder):
    header = layout.header_file(folder / "attempt-0", 0)
    header.write_text(json.dumps({**json.loads(header.read_text()), "world_size": "three"}))
    assert message(folder).startswith(f"{header} is damaged: Expected `int`, got `str`")
    header.write_text("{")
    assert message(folder).startswith(f"cannot read {header}: it is not JSON")


def test_a_newer_format(folder):
    describe(folder, 0, 0, schema=layout.SCHEMA + 1)
    assert "has format 2, expected at most 1; install the paceline that wrote it" in message(folder)


def test_a_header_is_not_overwritten_by_a_process_of_the_same_rank(folder):
    header = layout.header_file(folder / "attempt-0", 0)
    before = header.read_text()
    RankFiles(folder / "attempt-0", 0, 50)
    assert header.read_text() == before
