"""Frames on the pipe to the server: the end of a stream is not the end of a frame."""

import io

import pytest

from paceline.user_loop.server.frames import read_frame, write_frame


@pytest.mark.parametrize("size", [0, 3, 8, 10])
def test_a_stream_that_ends_within_a_frame_is_an_error(size):
    stream = io.BytesIO()
    write_frame(stream, b"content")
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(stream.getvalue()[:size]))
