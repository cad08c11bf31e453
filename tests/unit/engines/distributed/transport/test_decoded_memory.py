"""Memory of a message: at most four times its bytes once decoded, whatever its fields hold."""

import tracemalloc
from contextlib import suppress
from typing import get_args

import msgspec
import pytest

from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.encoded import at_most, decoded
from paceline.engines.distributed.transport.standby_messages import LENGTH_BYTES, split_events
from paceline.engines.distributed.transport.sum_messages import StepSummarized
from paceline.engines.distributed.transport.task_messages import ApplyUpdate, RemoteTask, decoded_metrics
from paceline.engines.distributed.transport.tensor_descriptions import allocate
from selections import parametrize_few

SMALL_BYTES = 1 << 16  # of what a decoder may take beside: structs, and lists that the job itself bounds
KINDS = get_args(messages.Message)


def filled(beginning, item, size_bytes):
    count = size_bytes // len(item)
    return beginning + count.to_bytes(4, "big") + item * count


def named(value, size_bytes):
    """Return a mapping of many short names to a value."""
    entries = [msgspec.msgpack.encode(f"{number:x}") + value for number in range(size_bytes // 5)]
    return b"\xdf" + len(entries).to_bytes(4, "big") + b"".join(entries)


def hostile_values(size_bytes):
    """Yield encoded values of about this size that take far more memory than bytes if they are decoded as objects."""
    pairs = b"\x91\x80", b"\x81\xa1a\xc0", b"\x92\x01\x90", b"\x92\xa1a\x01"
    numbers = [bytes([0x90 + count]) + b"\x00" * count for count in (3, 4, 6)]  # as of a minibatch, or its slice
    for item in (b"\x90", b"\x80", b"\x01", b"\xa0", b"\xcd\xff\xff", *pairs, *numbers):
        yield filled(b"\xdd", item, size_bytes)
    for value in (b"\x01", b"\x90", b"\x80"):
        yield named(value, size_bytes)
        yield filled(b"\xdd", named(value, 60), size_bytes)
    yield b"\xdb" + (size_bytes + 4).to_bytes(4, "big") + b"x" * size_bytes + "\U0001f600".encode()  # text in 32 bits
    yield filled(b"\xc6", b"\xff", size_bytes)


def valid_fields(kind):
    """Return an encoded value for each field of a message."""
    values = [
        b"\x01",
        b"\xa7stopped",
        b"\xc2",
        b"\xc4\x00",
        b"\x90",
        b"\x80",
        msgspec.msgpack.encode([1, 1, b"key"]),  # a file
        msgspec.msgpack.encode([1, 1, 1]),  # a place in a loop
        b"\x98" + b"\x01" * 4 + b"\xc3\x01\xc2\x01",
    ]
    fields = []
    for field in msgspec.structs.fields(kind):
        whole = field.type
        for candidate in values:
            try:
                msgspec.msgpack.decode(candidate, type=whole)
            except msgspec.ValidationError:
                continue
            fields.append(candidate)
            break
        else:
            raise AssertionError(f"no value for {kind.__name__}.{field.name}: {whole}")
    return fields


def decoded_bytes(content, decode=messages.decode):
    """Return the memory of a decoded message, and the most while it was decoded."""
    message = None  # its memory counts
    tracemalloc.start()
    try:
        with suppress(ValueError):
            message = decode(content)
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        del message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@parametrize_few("size_bytes", [1 << 14, 1 << 12, 1 << 18], keep=1)
def test_no_message_takes_more_than_four_times_its_bytes(kind, size_bytes):
    name = msgspec.msgpack.encode(kind.__name__)
    fields = valid_fields(kind)
    messages.decode(b"\xdd" + (1 + len(fields)).to_bytes(4, "big") + name + b"".join(fields))
    for value in hostile_values(size_bytes):
        for place in range(len(fields) + 2):  # the first one is the name, the last one a field too many
            changed = [name, *fields]
            changed[place : place + 1] = [value]
            content = b"\xdd" + len(changed).to_bytes(4, "big") + b"".join(changed)
            kept, peak = decoded_bytes(content)
            assert kept <= 4 * len(content) + SMALL_BYTES, (kind, place, value[:20])
            assert peak <= 5 * len(content) + SMALL_BYTES, (kind, place, value[:20])  # a text is widened in a copy


def event_of(content):
    return list(split_events(len(content).to_bytes(LENGTH_BYTES, "big") + content))


LATER = {  # what stays encoded within a message: what comes before a value in it, and its decoder in a small job
    "minibatches": (
        b"\x92\xc0",
        lambda content: RemoteTask(draw=1, version=1, sends_version=False, run_s=0.0, samples=content).minibatches(
            4, ahead=2
        ),
    ),
    "slices": (
        b"\x91\x95\x00\x00\x00\x01",
        lambda content: RemoteTask(draw=1, version=1, sends_version=False, run_s=0.0, samples=content).minibatches(
            4, 2
        ),
    ),
    "update": (b"\x94\x01", lambda content: ApplyUpdate(content, is_read=False).decoded(gradients=4)),
    "reports": (
        b"",
        lambda content: StepSummarized(generation=1, now=0.0, reforms=False, reports=content).decoded(workers=4),
    ),
    "metrics": (b"", decoded_metrics),
    "addresses": (b"", lambda content: decoded(content, at_most(messages.Addresses, 3), "addresses")),
    "tensors": (b"", allocate),
    "shape": (b"\x81\xa1a\x92\xa7float32", allocate),
    "event": (b"", event_of),
    "evaluated": (b"\x81\xa9evaluated\x93\x00\x01", event_of),
    "compensations": (b"\x81\xa7arrival\x9d" + b"\x01" * 6 + b"\xc3" + b"\x01" * 5, event_of),
}


@pytest.mark.parametrize(("beginning", "decode"), LATER.values(), ids=LATER)
def test_what_a_receiver_decodes_later_is_bounded_by_its_job(beginning, decode):
    for value in hostile_values(1 << 16):
        content = beginning + value
        with pytest.raises(ValueError, match="it sent wrong"):
            decode(content)
        _, peak = decoded_bytes(content, decode)
        assert peak <= 4 * len(content) + SMALL_BYTES, value[:20]
