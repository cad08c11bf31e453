"""Lines of ranks on the terminal."""

import pytest

from paceline.launcher.output import LONGEST_LINE_BYTES, LabelledLines


@pytest.mark.parametrize(
    ("chunks", "shown"),
    [
        ([b"one\ntwo\n"], b"> one\n> two\n"),
        ([b"o", b"ne", b"\n"], b"> one\n"),
        ([b"no end"], b"> no end\n"),
        ([b"\n\n"], b"> \n> \n"),
        ([b"dos\r\n"], b"> dos\n"),
        ([b"dos\r", b"\n"], b"> dos\n"),
        ([b"\r 1 %", b"\r 2 %", b"\r 3 %\nnext\n"], b">  3 %\n> next\n"),
        ([b"\xff\x00\n"], b"> \xff\x00\n"),
        ([], b""),
    ],
)
def test_each_line_has_a_label(chunks, shown):
    written = []
    lines = LabelledLines("> ", written.append)
    for chunk in chunks:
        lines.write(chunk)
    lines.close()
    assert b"".join(written) == shown


def test_a_line_that_does_not_end_is_not_kept_for_ever():
    written = []
    lines = LabelledLines("", written.append)
    for _ in range(3):
        lines.write(b"x" * LONGEST_LINE_BYTES)
    assert sum(map(len, written)) > LONGEST_LINE_BYTES
    for _ in range(100_000):
        lines.write(b"\r100 %")
    lines.close()
    assert written[-1] == b"100 %\n"
