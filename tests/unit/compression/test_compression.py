"""Codes of vectors: what they keep, what error feedback brings, and both ends of a difference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.compression.codecs import make_codec
from paceline.compression.compressed_vectors import CompressedFormat
from paceline.core.wire import parse_wire
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.transport.compressed_wire import WHOLE
from paceline.engines.distributed.transport.wire import WireBuffer
from paceline.engines.distributed.transport.wires import make_wire
from paceline.errors import UsageError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from selections import parametrize_few
from tiny_jobs import tiny_job

CODES = ["int8", "int4", "top_k(share=0.01)"]
counts = st.one_of(st.integers(1, 1500), st.sampled_from([65536, 65537, 262144, 262145, 300_000]))


class Mixed(nn.Module):
    """Model with parameters of two types, and buffers."""

    def __init__(self, count=1000):
        super().__init__()
        self.plain = nn.Parameter(torch.randn(count))
        self.precise = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("steps", torch.tensor(12345678901))


def vectors_of(layout, seed):
    vectors = layout.allocate()
    torch.manual_seed(seed)
    for flat in [*vectors.flat_parameters, *vectors.flat_buffers]:
        flat.copy_(1000 * torch.randn(flat.shape))
    return vectors


def encoded(text, values):
    codec = make_codec(parse_wire(text))
    memory, decoded = torch.zeros(codec.nbytes(len(values)), dtype=torch.uint8), torch.empty(len(values))
    codec.encode(values, memory, decoded)
    received = torch.full((len(values),), torch.nan)
    codec.decode(memory, received)
    assert torch.equal(received, decoded)
    return decoded


@given(count=st.integers(1, 1500), seed=st.integers(0, 99), scale=st.sampled_from([1e-35, 1e-20, 1.0, 1e20]))
def test_integers_are_within_half_a_step_of_their_block(count, seed, scale):
    torch.manual_seed(seed)
    values = torch.randn(count) * scale
    for text, levels in (("int8", 127), ("int4", 7)):
        decoded = encoded(text, values)
        for block, kept in zip(values.split(256), decoded.split(256), strict=True):
            step = float(block.abs().max()) / levels
            assert float((block - kept).abs().max()) <= (0.5001 * step if scale > 1e-30 else 1.001 * step * levels)


def test_a_block_of_zeros_stays_zero():
    for text in CODES:
        assert encoded(text, torch.zeros(700)).eq(0).all()


@given(count=counts, share=st.sampled_from([1e-4, 0.01, 0.3, 1.0]), seed=st.integers(0, 9))
def test_the_largest_values_of_a_chunk_are_kept_as_they_are(count, share, seed):
    torch.manual_seed(seed)
    values = torch.randn(min(count, 65536))
    decoded = encoded(f"top_k(share={share})", values)
    kept = decoded != 0
    assert int(kept.sum()) == max(1, -int(-share * len(values) // 1))
    assert torch.equal(decoded[kept], values[kept])
    assert kept.all() or float(values[kept].abs().min()) >= float(values[~kept].abs().max())


@pytest.mark.parametrize("text", CODES)
@pytest.mark.parametrize("count", [3, 1000, 300_000])
def test_nothing_is_lost_and_other_types_and_buffers_are_exact(text, count):
    layout = FlatLayout(Mixed(count))
    wire = CompressedFormat(parse_wire(text), layout)
    error, memory, received = layout.allocate(), wire.allocate(None), layout.allocate()
    total = torch.zeros(count, dtype=torch.float64)
    for seed in range(3):
        vectors = vectors_of(layout, seed)
        wire.compress(vectors, error, memory)
        wire.decompress(memory, received)
        total += vectors.flat_parameters[0].double() - received.flat_parameters[0].double()
        for ours, theirs in zip(
            [*vectors.flat_parameters[1:], *vectors.flat_buffers],
            [*received.flat_parameters[1:], *received.flat_buffers],
            strict=True,
        ):
            assert torch.equal(ours, theirs)
    assert torch.allclose(total, error.flat_parameters[0].double(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("text", "ratio"), [("int8", 3.9), ("int4", 7.7), ("top_k(share=0.01)", 66)])
def test_bytes_on_the_wire(text, ratio):
    layout = FlatLayout(nn.Linear(2000, 1000))
    assert make_wire("float32", layout).nbytes / make_wire(text, layout).nbytes >= ratio


@parametrize_few("text", CODES, keep=1)
def test_differences_bring_the_receiver_to_the_version_and_both_ends_agree(text):
    model = Mixed(3000)
    layout = FlatLayout(model)
    job = tiny_job()
    server = ParameterServer(job, model, layout, None)
    published = PublishedVersions(layout, make_wire(text, layout))
    receiver = WireBuffer(make_wire(text, layout), layout.allocate())
    server.publish(published.publish(0))
    distances = []
    for _ in range(200):
        buckets, is_difference = published.message(7, 0, is_new=True)
        [(number, memory)] = buckets
        if is_difference:
            receiver.memory.copy_(memory)
            CompressedFormat(parse_wire(text), layout).add_difference(receiver.memory, receiver.vectors)
        else:
            assert number == WHOLE
            receiver.vectors.memory.copy_(memory)
            server.state.flat_parameters[0].add_(torch.randn(3000))  # the server moves once
        assert torch.equal(receiver.vectors.memory, published.held_by(7, 0))
        distances.append(float((receiver.vectors.flat_parameters[0] - server.state.flat_parameters[0]).norm()))
    assert distances[-1] < 1e-3 * distances[1] + 1e-4
    published.forget(7)
    assert published.message(7, 0, is_new=True)[1] is False
    assert published.message(7, 0, is_new=False) == ([], False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int16", "did you mean 'int8'"),
        ("top_k", r"type top_k\(share=...\)"),
        ("top_k(share=0)", r"share=0 is not a number in \(0, 1\]"),
        ("top_k(k=3)", "top_k"),
        ("int8(bits=3)", "int8 has no knobs"),
    ],
)
def test_other_words_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_wire(text)
