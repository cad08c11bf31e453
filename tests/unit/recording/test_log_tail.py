"""The tail of a log gives the records that reading the whole log gives, whenever it looks."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineWarning, RunError
from paceline.recording import log_tail
from paceline.recording.event_log import read_records, to_line
from paceline.recording.log_tail import LogTail
from written_runs import arrival, begun, two_updates, update

LINES = [to_line(record) for record in two_updates()]
LOG = b"".join(LINES)


def read_all(tail):
    """Return the lines of all records that can be read now, how often the tail starts over, and the bytes left."""
    lines, restarts = [], 0
    while True:
        new = tail.read()
        lines = ([] if new.starts_over else lines) + [to_line(record) for record in new.records]
        restarts += new.starts_over
        if not new.records:
            return lines, restarts, new.left_bytes


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, len(LOG)), max_size=8).map(sorted))
def test_a_log_that_grows_in_pieces_gives_each_record_once(tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    tail, found = LogTail(path), []
    with path.open("wb", buffering=0) as file:
        for begin, end in zip([0, *cuts], [*cuts, len(LOG)], strict=True):
            file.write(LOG[begin:end])
            new, _, left_bytes = read_all(tail)
            found += new
            assert found == LINES[: LOG[:end].count(b"\n")]
            assert left_bytes == end - (LOG.rfind(b"\n", 0, end) + 1)


def test_a_log_that_is_not_there_yet_has_no_records(tmp_path):
    tail = LogTail(tmp_path / "events.jsonl")
    assert tail.read() == log_tail.Increment([])
    (tmp_path / "events.jsonl").write_bytes(LOG)
    assert read_all(tail)[:2] == (LINES, 1)


@pytest.mark.parametrize("kept", [0, 2, 5])
def test_a_log_that_was_cut_back_and_has_grown_beyond_its_old_end_is_read_again(tmp_path, kept):
    path = tmp_path / "events.jsonl"
    path.write_bytes(LOG)
    tail = LogTail(path)
    read_all(tail)
    new = [to_line(begun())] if not kept else []
    new += [to_line(arrival(0, 5 + i, 3.5, 4.0 + i)) for i in range(9)]
    with path.open("r+b") as file:  # the same file, as a resumed run writes to it
        file.truncate(len(b"".join(LINES[:kept])))
        file.seek(0, os.SEEK_END)
        file.write(b"".join(new))
    assert path.stat().st_size > len(LOG)
    assert read_all(tail)[:2] == ([*LINES[:kept], *new], 1)


def test_a_log_that_was_replaced_is_read_again(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(LOG)
    tail = LogTail(path)
    read_all(tail)
    (tmp_path / "new").write_bytes(LOG)
    (tmp_path / "new").rename(path)
    assert read_all(tail)[:2] == (LINES, 1)


def test_only_the_new_part_of_a_log_is_read(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    path.write_bytes(LOG)
    tail = LogTail(path)
    read_all(tail)
    parsed = []
    monkeypatch.setattr(log_tail, "parsed", lambda line, order, place: parsed.append((line, place)))
    with path.open("ab") as file:
        file.write(to_line(update(3, 5.0)))
    tail.read()
    assert parsed == [(to_line(update(3, 5.0)), f"{path}, line {len(LINES) + 1}")]


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(LOG[: LOG.index(b"\n") + 1] + b"{}\n")
    with pytest.raises(RunError, match=r"events.jsonl, line 2 is no record of a run"):
        LogTail(path).read()


def test_a_line_that_is_too_long_is_left_out_and_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(LOG + b"x" * (3 * log_tail.CHUNK_BYTES))
    tail = LogTail(path)
    records = tail.read().records
    with pytest.warns(PacelineWarning, match=rf"line {len(LINES) + 1} has more than 1048576 bytes: it is left out"):
        tail.read()
    assert [tail.read().left_bytes for _ in range(2)] == [log_tail.CHUNK_BYTES, 0]
    with path.open("ab") as file:
        file.write(b"x\n" + to_line(update(3, 5.0)))
    while not (more := tail.read()).records:
        assert not more.starts_over
    assert more.records == [update(3, 5.0)]
    with pytest.warns(PacelineWarning, match=rf"line {len(LINES) + 1} has more than 1048576 bytes: it is left out"):
        assert [*read_records(path)] == [*records, update(3, 5.0)]
