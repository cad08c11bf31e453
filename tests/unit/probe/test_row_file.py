"""Rows on disk: complete after a kill, and no failure reaches the script."""

import os

import pytest

from paceline.ddp_recording.layout import FLUSH_ROWS
from paceline.probe.row_file import RowFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "attempt-0" / "rank-0.csv"


def test_the_first_row_and_every_full_block_are_on_the_disk_at_once(path):
    file = RowFile(path, ("a", "b"))
    file.add((1, 2.5))
    assert path.read_text() == "a,b\n1,2.5\n"
    for row in range(FLUSH_ROWS - 1):
        file.add((row, 0))
    assert path.read_text() == "a,b\n1,2.5\n"
    file.add((0, 0))
    assert len(path.read_text().splitlines()) == 2 + FLUSH_ROWS


def test_what_is_left_is_written_by_a_flush(path):
    file = RowFile(path, ("a",))
    for row in range(3):
        file.add((row,))
    file.flush()
    assert path.read_text() == "a\n0\n1\n2\n"


def test_an_earlier_file_is_not_overwritten(path):
    RowFile(path, ("a",))
    with pytest.raises(FileExistsError):
        RowFile(path, ("a",))


def test_a_full_disk_ends_the_recording_with_one_line(path, monkeypatch, capsys):
    file = RowFile(path, ("a",))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    for row in range(3 * FLUSH_ROWS):
        file.add((row,))
    assert capsys.readouterr().err == f"paceline: recording ends, cannot write {path}: No space left on device\n"
