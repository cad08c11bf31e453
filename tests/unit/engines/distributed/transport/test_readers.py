"""Readers: messages and tensors that arrive in pieces of any size, and what is read before memory is known."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engines.distributed.transport.readers import (
    AHEAD_BYTES,
    MAX_MESSAGE_BYTES,
    MESSAGE,
    TENSOR,
    MessageReader,
    TensorReader,
)


class Kept:
    """Connection that keeps what its readers report, and has memory for tensors of known numbers."""

    def __init__(self, memory=()):
        self.memory = dict(memory)
        self.messages = []
        self.tensors = 0
        self.reasons = []
        self.is_full = lambda: False

    def on_bytes(self):
        pass

    def on_message(self, content, buckets, tensors):
        self.messages.append((bytes(content), bytes(buckets), tensors))

    def memory_of(self, number, nbytes):
        if number in self.memory and len(self.memory[number]) != nbytes:
            raise ValueError("another size")
        return self.memory.get(number)

    def on_tensor(self):
        self.tensors += 1

    def end(self, reason):
        self.reasons.append(reason)


def feed(reader, content, sizes):
    """Give a reader bytes in pieces of these sizes, in turn, and return those for which it has no memory."""
    turn = 0
    while content and (buffer := reader.next_buffer()) is not None:
        count = min(len(buffer), sizes[turn % len(sizes)], len(content))
        assert count
        buffer[:count] = content[:count]
        reader.on_bytes(count)
        content = content[count:]
        turn += 1
    return content


PIECES = st.lists(st.integers(1, 100_000), min_size=1, max_size=5)
CONTENTS = st.one_of(st.binary(min_size=1, max_size=50), st.integers(60_000, 200_000).map(lambda size: b"x" * size))


@settings(max_examples=30)
@given(st.lists(st.tuples(CONTENTS, st.binary(max_size=50), st.integers(0, 2**63)), max_size=5), PIECES)
def test_messages_are_the_same_in_pieces_of_any_size(sent, sizes):
    kept = Kept()
    content = b"".join(MESSAGE.pack(len(one), len(small), tensors) + one + small for one, small, tensors in sent)
    assert feed(MessageReader(kept), content, sizes) == b""
    assert kept.messages == sent
    assert not kept.reasons


def test_memory_grows_with_what_arrives_and_not_with_what_is_claimed():
    reader = MessageReader(Kept())
    feed(reader, MESSAGE.pack(MAX_MESSAGE_BYTES, 0, 0) + bytes(100_000), [1 << 16])
    assert 100_000 < len(reader._memory) <= 400_000


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3 * AHEAD_BYTES), min_size=1, max_size=6), PIECES, st.integers(0, 5))
def test_tensors_are_the_same_in_pieces_of_any_size_also_when_memory_comes_late(nbytes, sizes, late):
    late = min(late, len(nbytes) - 1)
    sent = [bytes([number + 1]) * size for number, size in enumerate(nbytes)]
    memory = {number: memoryview(bytearray(size)) for number, size in enumerate(nbytes)}
    kept = Kept({number: each for number, each in memory.items() if number != late})
    reader = TensorReader(kept)
    content = b"".join(TENSOR.pack(number, len(each)) + each for number, each in enumerate(sent))
    rest = feed(reader, content, sizes)
    assert reader.next_buffer() is None
    assert kept.tensors == late
    kept.memory = memory
    assert reader.next_buffer() is not None
    assert feed(reader, rest, sizes) == b""
    assert [bytes(memory[number]) for number in range(len(sent))] == sent
    assert kept.tensors == len(sent)
    assert not kept.reasons


def test_a_tensor_of_another_size_is_refused_before_one_of_its_bytes_is_read():
    kept = Kept({0: memoryview(bytearray(10))})
    feed(TensorReader(kept), TENSOR.pack(0, 11), [100])
    assert kept.reasons == ["invalid tensor: another size"]
    assert bytes(kept.memory[0]) == bytes(10)
