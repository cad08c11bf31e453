"""Memory of a message of a process that joins: at most four times its bytes once decoded, whatever its fields hold."""

import tracemalloc
from contextlib import suppress
from typing import get_args

import msgspec
import pytest

from paceline.engines.distributed.transport import messages
from selections import parametrize_few

SMALL_BYTES = 1 << 16  # of what a decoder may take beside: structs, and lists that the job itself bounds
KINDS = get_args(messages.PeerMessage)


def filled(beginning, item, size_bytes):
    count = size_bytes // len(item)
    return beginning + count.to_bytes(4, "big") + item * count


def named(value, size_bytes):
    """Return a mapping of many short names to a value."""
    entries = [msgspec.msgpack.encode(f"{number:x}") + value for number in range(size_bytes // 5)]
    return b"\xdf" + len(entries).to_bytes(4, "big") + b"".join(entries)


def hostile_values(size_bytes):
    """Yield encoded values of about this size that take far more memory than bytes if they are decoded as objects."""
    for item in (b"\x90", b"\x80", b"\x01", b"\xa0", b"\xcd\xff\xff", b"\x91\x80", b"\x81\xa1a\xc0", b"\x92\x01\x90"):
        yield filled(b"\xdd", item, size_bytes)
    for value in (b"\x01", b"\x90", b"\x80"):
        yield named(value, size_bytes)
        yield filled(b"\xdd", named(value, 60), size_bytes)
    yield b"\xdb" + (size_bytes + 4).to_bytes(4, "big") + b"x" * size_bytes + "\U0001f600".encode()  # text in 32 bits
    yield filled(b"\xc6", b"\xff", size_bytes)


def valid_fields(kind):
    """Return an encoded value for each field of a message."""
    values = {int: b"\x01", float: b"\x01", str: b"\xa7stopped", bool: b"\xc2", bytes: b"\xc4\x00", tuple: b"\x90"}
    fields = []
    for field in msgspec.structs.fields(kind):
        whole = field.type
        for candidate in [*values.values(), b"\x98" + b"\x01" * 4 + b"\xc3\x01\xc2\x01"]:
            try:
                msgspec.msgpack.decode(candidate, type=whole)
            except msgspec.ValidationError:
                continue
            fields.append(candidate)
            break
        else:
            raise AssertionError(f"no value for {kind.__name__}.{field.name}: {whole}")
    return fields


def decoded_bytes(content):
    """Return the memory of a decoded message, and the most while it was decoded."""
    message = None  # its memory counts
    tracemalloc.start()
    try:
        with suppress(ValueError):
            message = messages.decode(content, of_peer=True)
        return tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        del message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@parametrize_few("size_bytes", [1 << 15, 1 << 12, 1 << 18], keep=1)
def test_no_message_of_a_process_that_joins_takes_more_than_four_times_its_bytes(kind, size_bytes):
    name = msgspec.msgpack.encode(kind.__name__)
    fields = valid_fields(kind)
    messages.decode(b"\xdd" + (1 + len(fields)).to_bytes(4, "big") + name + b"".join(fields), of_peer=True)
    for value in hostile_values(size_bytes):
        for place in range(len(fields) + 2):  # the first one is the name, the last one a field too many
            changed = [name, *fields]
            changed[place : place + 1] = [value]
            content = b"\xdd" + len(changed).to_bytes(4, "big") + b"".join(changed)
            kept, peak = decoded_bytes(content)
            assert kept <= 4 * len(content) + SMALL_BYTES, (kind, place, value[:20])
            assert peak <= 5 * len(content) + SMALL_BYTES, (kind, place, value[:20])  # a text is widened in a copy
