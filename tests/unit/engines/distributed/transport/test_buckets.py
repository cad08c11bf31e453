"""Gradients that leave piece by piece are those that leave as a whole, whatever autograd does in whichever order."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.engines.distributed.transport import wire_format as wires
from paceline.engines.distributed.transport.buckets import (
    MAX_BUCKETS,
    Bucket,
    BucketSender,
    make_buckets,
)
from paceline.engines.distributed.transport.wire import WireBuffer
from paceline.engines.distributed.transport.wire_format import WireFormat
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.replica import Replica
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job

WIDTH = 24


@given(st.integers(0, 200), st.integers(0, 300), st.integers(64, 5000))
def test_pieces_cover_every_byte_once(words, more, piece_nbytes):
    gradient_nbytes, nbytes = 64 * (words + 1), 64 * (words + 1) + more
    pieces = make_buckets(gradient_nbytes, nbytes, piece_nbytes)
    assert [byte for piece in sorted(pieces) for byte in range(*piece)] == list(range(nbytes))
    assert len(pieces) <= MAX_BUCKETS
    assert len(pieces) == 1 or gradient_nbytes in {piece.stop for piece in pieces}  # buffers are apart
    assert len({piece.start % 64 for piece in pieces}) == 1


@settings(deadline=None)
@given(st.data())
def test_the_other_side_ends_up_with_the_gradient_whatever_is_accumulated_when(data):
    """Compare with sending everything at the end; a number stands for each parameter's sum."""
    bytes_of = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    ends = [0, *torch.tensor(bytes_of).cumsum(0).tolist()]
    places = [Bucket(ends[i], ends[i + 1]) for i in range(len(bytes_of))]
    buffers = ends[-1] + 5
    inner = data.draw(st.sets(st.integers(1, ends[-1]), max_size=5))
    cuts = sorted({0, ends[-1], buffers} | inner) if inner else [0, buffers]
    pieces = [Bucket(cuts[i], cuts[i + 1]) for i in range(len(cuts) - 1)]
    there = [0] * buffers

    def send(number):
        there[slice(*pieces[number])] = here[slice(*pieces[number])]

    departure = BucketSender(pieces, places, send)
    for _ in range(2):  # a second gradient too
        here = [0] * len(there)
        departure.begin()
        for parameter in data.draw(st.lists(st.integers(0, len(places) - 1), max_size=12)):
            for byte in range(*places[parameter]):
                here[byte] += 1
            departure.on_accumulated(parameter)
        here[-1] = 7  # of the buffers
        gone = set(departure.sent)
        rest, again = departure.remaining()
        assert set(rest) == set(range(len(pieces))) - gone
        assert again <= gone
        for number in [*rest, *again]:
            send(number)
        assert there == here


class Looped(nn.Module):
    """Calls one layer several times, leaves one out, and ties the last one to the first."""

    def __init__(self, call=None):
        super().__init__()
        self.first = nn.Linear(5, WIDTH, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(5, 200)
        self.call = call or (lambda part, x: part(x))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for _ in range(3):
            x = self.call(lambda x: torch.tanh(self.norm(self.middle(x))), x)
        return self.out(x @ self.first.weight)


reentrant, without = (partial(checkpoint, use_reentrant=kind) for kind in (True, False))


@parametrize_few("microbatches", [1, 3], keep=1)
@pytest.mark.parametrize("wire", ["float32", "bf16"])
@pytest.mark.parametrize("call", [None, without, reentrant], ids=["looped", "checkpointed", "reentrant"])
def test_every_kind_of_backward_pass_sends_its_gradient(call, wire, microbatches, monkeypatch):
    monkeypatch.setattr(wires, "make_buckets", partial(make_buckets, bucket_nbytes=512))
    job = tiny_job(model=partial(Looped, call), data=dataset(dtype=torch.float32), microbatches=microbatches)
    replica = Replica(job, 1, 1)
    replica.on_gradient_ready = lambda parameter: departure.on_accumulated(parameter)
    plain = Replica(job, 1, 1)
    layout = replica.layout
    version, gradient, expected = layout.allocate(), layout.allocate(), layout.allocate()
    for view, tensor in zip(
        [*version.parameters, *version.buffers], [*replica.model.parameters(), *replica.model.buffers()], strict=True
    ):
        view.copy_(tensor.detach())
    leaving, there = (
        WireBuffer(WireFormat(wire, layout), gradient),
        WireBuffer(WireFormat(wire, layout), layout.allocate()),
    )

    def send(number):
        leaving.pack(number)
        there.buckets[number].copy_(leaving.buckets[number])

    departure = BucketSender(WireFormat(wire, layout).buckets, WireFormat(wire, layout).parameters, send)
    early, repeated = [], []
    for draw in (1, 2, 3):
        departure.begin()
        measured = replica.gradient(0, draw, None, version, gradient)
        early.append(len(departure.sent))
        rest, again = departure.remaining()
        repeated.append(len(again))
        for number in [*rest, *again]:
            send(number)
        assert measured[:5] == pytest.approx(plain.gradient(0, draw, None, version, expected)[:5], rel=0, nan_ok=True)
        whole = WireBuffer(WireFormat(wire, layout), expected)
        whole.pack()
        assert torch.equal(there.memory, whole.memory)
    assert min(early) > 0
    assert repeated == ([early[0] - early[1], 0, 0] if call is reentrant else [0, 0, 0])
    assert (early[0] > early[1]) == (call is reentrant)


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_what_two_pieces_have_in_common(start, stop):
    piece, other = Bucket(min(start, stop), max(start, stop)), Bucket(1000, 2000)
    common = piece.intersection(other)
    assert common == other.intersection(piece)
    assert max(0, common.nbytes) == len(range(max(piece.start, 1000), min(piece.stop, 2000)))


def test_parameters_lie_where_they_are_packed():
    layout = FlatLayout(Looped())
    wire = WireFormat("bf16", layout)
    vectors = layout.allocate()
    for number, view in enumerate(vectors.parameters):
        view.fill_(number + 1)
    memory = wire.allocate(vectors)
    wire.pack(vectors, memory)
    for number, place in enumerate(wire.parameters):
        assert set(place.of(memory).view(torch.bfloat16).tolist()) == {number + 1.0}
