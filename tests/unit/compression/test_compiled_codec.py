"""Codes in compiled loops: the bytes and the bits of torch for vectors of any length, values, views and threads."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.compression import compiled_codec
from paceline.compression.codecs import TINY, Chunk, IntegerCodec, TopKCodec
from paceline.compression.compiled_codec import CompiledIntegerCodec, fastest_codec
from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import BLOCK, IntegerCode, TopKCode, parse_wire
from paceline.server import kernels
from paceline.tensors.flat_buffers import FlatLayout
from selections import parametrize_few

loops = pytest.importorskip("paceline.compression.compiled_integers")

LEVELS = pytest.mark.parametrize("levels", [127, 7])
LONG = [IntegerCodec.chunk - 1, IntegerCodec.chunk, IntegerCodec.chunk + 1, 300_001]
LARGEST = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, TINY, -TINY, TINY / 2, 1.5 * TINY, LARGEST / 4, -LARGEST / 4, 1.0, -0.5]
VALUES = ["normal", "special", "lone", "ties of 127", "ties of 7", "zeros", "tiny", "huge"]


@pytest.fixture(scope="module", autouse=True)
def _compiled_before():
    """Compile outside of the time of a test."""
    for levels in (127, 7):
        assert compiled_codec._compiled_codec(IntegerCode(levels)) is not None


def values_of(kind, length, seed):
    """Return finite values of one kind."""
    random = torch.Generator().manual_seed(1000 * length + seed)
    normal = torch.randn(length, generator=random)
    if kind == "special":
        return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (length,), generator=random)]
    if kind == "lone":  # one value in each block
        lone = torch.zeros(length)
        lone[seed::BLOCK] = torch.tensor(SPECIAL).repeat(len(lone))[: len(lone[seed::BLOCK])]
        return lone
    if kind.startswith("ties"):  # the scale is 1 in a block whose largest value is the number of levels
        largest = int(kind.split()[-1])
        ties = torch.randint(-2 * largest, 2 * largest + 1, (length,), generator=random) / 2
        ties[::BLOCK] = largest
        return ties
    scale = {"normal": 1.0, "zeros": 0.0, "tiny": 3e-31, "huge": LARGEST / 64}[kind]
    return normal * scale


def chunks_of(codec, memory, *vectors):
    starts = range(0, len(vectors[0]), codec.chunk)
    nbytes = codec.nbytes(codec.chunk)
    for number, start in enumerate(starts):
        parts = [each[start : start + codec.chunk] for each in vectors]
        yield Chunk(parts, memory[number * nbytes :][: codec.nbytes(len(parts[0]))])


def exchanged(codec, kind, length, offset, rounds=3):
    """Return all that several messages and differences leave behind, of views of larger vectors."""
    error, sent, decoded, received = (torch.zeros(length + offset)[offset:] for _ in range(4))
    nbytes = -(-length // codec.chunk) * codec.nbytes(codec.chunk)
    left = []
    for seed in range(rounds):
        values = torch.cat([torch.ones(offset), values_of(kind, length, seed)])[offset:]
        message, difference = (torch.zeros(nbytes + 1, dtype=torch.uint8)[:nbytes] for _ in range(2))
        codec.compress(chunks_of(codec, message, values, error))
        codec.compress_difference(chunks_of(codec, difference, values, sent))
        codec.decompress(chunks_of(codec, message, decoded))
        codec.add_difference(chunks_of(codec, difference, received))
        left += [message, difference, *(each.clone().view(torch.uint8) for each in (error, sent, decoded, received))]
        assert torch.equal(sent, received)
    return left


@LEVELS
@parametrize_few("kind", VALUES, keep=1)
@given(length=st.integers(0, 3 * BLOCK + 1), offset=st.integers(0, 3))
def test_messages_decoded_values_and_errors_have_the_bits_of_torch(levels, kind, length, offset):
    code = IntegerCode(levels)
    ours = exchanged(CompiledIntegerCodec(code, loops), kind, length, offset)
    theirs = exchanged(IntegerCodec(code), kind, length, offset)
    assert all(map(torch.equal, ours, theirs))


@LEVELS
@parametrize_few("length", LONG, keep=1)
def test_vectors_of_about_a_chunk_or_more_have_the_bits_of_torch(levels, length):
    code = IntegerCode(levels)
    ours, theirs = CompiledIntegerCodec(code, loops), IntegerCodec(code)
    assert all(map(torch.equal, exchanged(ours, "normal", length, 1), exchanged(theirs, "normal", length, 1)))


@LEVELS
def test_threads_change_no_bit(levels):
    code, before = IntegerCode(levels), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        ours = exchanged(CompiledIntegerCodec(code, loops), "normal", 800_001, 0, rounds=1)
    finally:
        torch.set_num_threads(before)
    theirs = exchanged(IntegerCodec(code), "normal", 800_001, 0, rounds=1)
    assert all(map(torch.equal, ours, theirs))


@parametrize_few("text", ["int8", "int4"], keep=1)
def test_a_process_with_loops_and_one_without_exchange_the_same_messages(text):
    layout = FlatLayout(nn.Linear(600, 601))
    vectors, left = layout.allocate(), []
    with_loops, without = (CompressedFormat(parse_wire(text), layout, loads_numba=each) for each in (True, False))
    assert isinstance(with_loops._codec, CompiledIntegerCodec)
    assert type(without._codec) is IntegerCodec
    for sender, receiver in ((with_loops, without), (without, with_loops)):
        error, sent, decoded, received = (layout.allocate() for _ in range(4))
        message, difference = sender.allocate(vectors), sender.allocate(vectors)
        for seed in range(3):
            vectors.flat_parameters[0].copy_(values_of("normal", len(vectors.flat_parameters[0]), seed))
            sender.compress(vectors, error, message)
            receiver.decompress(message, decoded)
            sender.compress_difference(vectors, sent, difference)
            receiver.add_difference(difference, received)
            assert torch.equal(sent.memory, received.memory)
        left.append([message, difference, error.memory, sent.memory, decoded.memory])
    assert all(map(torch.equal, *left))


def test_loops_are_for_processes_that_load_numba_for_long_vectors_and_for_integers(monkeypatch):
    code = parse_wire("int8")
    assert type(fastest_codec(code, kernels.LEAST, loads_numba=True)) is CompiledIntegerCodec
    assert type(fastest_codec(code, kernels.LEAST - 1, loads_numba=True)) is IntegerCodec
    assert type(fastest_codec(code, kernels.LEAST, loads_numba=False)) is IntegerCodec
    assert type(fastest_codec(TopKCode(0.01), kernels.LEAST, loads_numba=True)) is TopKCodec
    monkeypatch.setattr(compiled_codec, "_compiled_codec", compiled_codec._compiled_codec.__wrapped__)
    monkeypatch.setattr(compiled_codec, "loops_for", kernels.loops_for.__wrapped__)
    monkeypatch.setitem(sys.modules, "paceline.tensors.compiled", None)
    monkeypatch.delattr(sys.modules["paceline.tensors"], "compiled", raising=False)
    assert type(fastest_codec(code, kernels.LEAST, loads_numba=True)) is IntegerCodec


def test_loops_that_differ_from_torch_are_not_used(monkeypatch, caplog):
    class Other:
        """Loops whose error is a little different."""

        compress_difference, decompress = loops.compress_difference, loops.decompress
        add_difference = loops.add_difference

        @staticmethod
        def compress(values, error, *code):
            loops.compress(values, error, *code)
            error[3] *= 1 + 2**-20

    monkeypatch.setattr("paceline.compression.compiled_integers", Other)
    assert compiled_codec._compiled_codec.__wrapped__(IntegerCode(127)) is None
    assert "differ from torch for integers up to 127" in caplog.text
