"""Messages on the wire: what is encoded is decoded unchanged, and nothing else is a message."""

from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.events import Accept, Apply, Compute, Measured, Minibatch, MinibatchSlice
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.messages import End, decode, encode
from paceline.engines.distributed.transport.task_messages import ApplyUpdate, RemoteTask, RemoteTaskDone

WHOLE = st.integers(0, 2**53)
NUMBER = st.one_of(st.none(), WHOLE)
SLICES = st.lists(st.builds(MinibatchSlice, WHOLE, WHOLE, NUMBER, NUMBER, WHOLE, WHOLE), max_size=2).map(tuple)
SAMPLES = st.one_of(st.none(), st.builds(Minibatch, WHOLE, NUMBER, NUMBER, WHOLE, SLICES, st.floats(0.1, 8)))


def sent(message):
    """Return a message as the other process receives it."""
    return decode(encode(message)[0])


@given(WHOLE, WHOLE, st.booleans(), st.floats(0, 1e9), SAMPLES, st.one_of(st.none(), WHOLE))
def test_tasks_are_decoded_unchanged(draw, version, sends_version, run_s, minibatch, checksum):
    command = Compute(
        worker=0, version=version, draw=draw, minibatch=minibatch, upcoming=(minibatch,) if minibatch else ()
    )
    task = RemoteTask.of(command, sends_version=sends_version, run_s=run_s, checksum=checksum)
    again = sent(task)
    assert again == task
    minibatches = again.minibatches(workers=2, ahead=1)
    assert minibatches == (command.minibatch, command.upcoming)
    assert [type(value) for value in (again.run_s, minibatches.minibatch)] == [float, type(minibatch)]


SQUARE = st.one_of(st.just(nan), st.floats(min_value=0))


@given(st.floats(), st.integers(1, 2**32), SQUARE, SQUARE, st.floats(0, 1e9), st.booleans())
def test_measurements_are_decoded_unchanged(loss, samples, squared_norm, variance, compute_s, finite):
    done = RemoteTaskDone(
        draw=3,
        busy_s=0.1,
        measured=Measured(
            loss=loss, samples=samples, squared_norm=squared_norm, variance=variance, finite=finite, compute_s=compute_s
        ),
    )
    again = sent(done)
    assert (again.draw, again.busy_s) == (3, 0.1)
    np.testing.assert_equal(tuple(again.measured), tuple(done.measured))


def test_a_shard_server_receives_all_numbers_of_an_update():
    fields = {field: number for number, field in enumerate(Apply._fields, start=2)}
    update = Apply(
        **{
            **fields,
            "gradients": (Accept(worker=0, draw=0, staleness=0, samples=1),) * 3,
            "reason": "",
            "measure": True,
            "is_skipped": True,
        }
    )
    again = sent(ApplyUpdate(encoded(update), is_read=True))
    assert again.is_read
    assert again.decoded(gradients=3) == update


def test_a_reason_that_names_a_file_whose_name_is_not_utf_8_is_sent():
    assert sent(End("failed", "cannot write caf\udce9")).reason == r"cannot write caf\udce9"


def test_a_message_with_a_deeply_nested_value_is_none():
    whole, one_more = b"\x99", b"\x9a"
    fields = b"\xa5Hello\xa1a\x00\xc4\x00\x00\xa0\x00\xa0\xff"
    assert decode(whole + fields).name == "a"
    with pytest.raises(ValueError, match="recursion"):
        decode(one_more + fields + b"\x91" * 20_000 + b"\xc0")


@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"\x91\xa6Absent", b"\x92\xaaCancelTask\xa1x", b"\xc1" * 40, b"\x91" * 9999]
)
def test_other_bytes_are_no_message(content):
    with pytest.raises(ValueError, match=r"."):
        decode(content)
