import gzip
import struct

import pytest
import torch

from paceline.errors import UsageError
from paceline.jobs.mnist import read_idx

IMAGES = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)
GOOD = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 4) + bytes(IMAGES.flatten().tolist())
# Test names are made of these bytes, and every test process must find the same names: no clock in them.
GOOD_GZ = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize("encode", [bytes, gzip.compress])
def test_reads_what_was_written_plain_or_compressed(tmp_path, encode):
    path = tmp_path / "images"
    path.write_bytes(encode(GOOD))
    assert torch.equal(read_idx(path, item_shape=(3, 4)), IMAGES)


def test_reads_scalars(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([7, 0, 9]))
    assert read_idx(path, item_shape=()).tolist() == [7, 0, 9]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "starts with nothing; expected 00000803"),
        (b"\x00\x00\x08", "starts with 000008; expected 00000803"),
        (b"<html>", "starts with 3c68746d; expected 00000803, IDX with 3 dimensions"),
        (struct.pack(">4BI", 0, 0, 8, 1, 2) + b"ab", "starts with 00000801; expected 00000803"),
        (struct.pack(">4B3I", 0, 0, 13, 3, 2, 3, 4), "starts with 00000d03; expected 00000803"),
        (GOOD[:9], "ends in its header: 9 bytes, expected 16"),
        (GOOD[:-1], "holds 23 bytes of items; expected 24"),
        (GOOD + b"x", "holds 25 bytes of items; expected 24"),
        (struct.pack(">4B3I", 0, 0, 8, 3, 0, 3, 4), "holds 0 bytes of items; expected 0 .* and > 0"),
        (
            struct.pack(">4B3I", 0, 0, 8, 3, 2, 4, 3) + GOOD[16:],
            r"items of shape \(4, 3\); expected \(3, 4\)",
        ),
        (GOOD_GZ[:-9], "cannot read .*: Compressed file ended"),
        (GOOD_GZ[:10] + b"\xff" * 30, "cannot read .*; expected an IDX file"),
        (gzip.compress(GOOD[:-1], mtime=0), "holds 23 bytes of items; expected 24"),
    ],
)
def test_a_damaged_file_is_named_with_what_was_found_and_expected(tmp_path, content, said):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        read_idx(path, item_shape=(3, 4))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read '.*nowhere': No such file"):
        read_idx(tmp_path / "nowhere", item_shape=())
