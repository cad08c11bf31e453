"""What is rounded on the wire, and how; where versions lie while they are sent."""

from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.wire import WIRES
from paceline.engines.distributed.parameter_server.published_versions import PublishedVersions
from paceline.engines.distributed.transport.wire import WireBuffer
from paceline.engines.distributed.transport.wire_format import DTYPES, WireFormat
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.flat_buffers import FlatLayout
from paceline.worker.torch_utils import build_model
from tiny_jobs import dataset, sgd, small_net, tiny_job, update_of


class Mixed(nn.Module):
    """Parameters and buffers of several types."""

    def __init__(self):
        super().__init__()
        self.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.usual = nn.Parameter(torch.randn(1001))
        self.high = nn.Parameter(torch.randn(7, dtype=torch.float64))
        self.register_buffer("counter", torch.tensor([16_777_217, -3]))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("flag", torch.tensor([True, False, True]))


def filled(layout):
    vectors = layout.allocate()
    for flat in [*vectors.flat_parameters, *vectors.flat_buffers]:
        values = torch.randn(flat.shape, dtype=torch.float64) * 100
        flat.copy_(values > 0 if flat.dtype == torch.bool else values)
    return vectors


@pytest.mark.parametrize("wire", ["bf16", "float16"])
def test_parameters_of_float32_are_rounded_to_nearest_and_all_else_arrives_as_it_was(wire):
    layout = FlatLayout(Mixed())
    sent, come = filled(layout), layout.allocate()
    there, here = WireBuffer(WireFormat(wire, layout), sent), WireBuffer(WireFormat(wire, layout), come)
    there.pack()
    here.memory.copy_(there.memory)
    here.unpack()
    for ours, theirs in zip([*come.parameters, *come.buffers], [*sent.parameters, *sent.buffers], strict=True):
        is_rounded = ours is come.parameters[1]
        assert torch.equal(ours, theirs.to(DTYPES[wire]).float() if is_rounded else theirs)
    assert not torch.equal(come.parameters[1], sent.parameters[1])


def test_half_as_many_bytes_travel():
    layout = FlatLayout(nn.Linear(1000, 1000))
    exact = WireFormat("float32", layout).nbytes
    assert exact == layout.nbytes
    assert [WireFormat(wire, layout).nbytes / exact for wire in ("bf16", "float16")] == pytest.approx(
        [0.5, 0.5], abs=1e-4
    )


@pytest.mark.parametrize("model", [Mixed, partial(nn.Linear, 3, 2, dtype=torch.float64)], ids=["float32", "float64"])
def test_nothing_is_copied_where_nothing_is_rounded(model):
    layout = FlatLayout(model())
    wire = WireFormat("float32" if model is Mixed else "bf16", layout)
    vectors = layout.allocate()
    assert wire.nbytes == layout.nbytes
    assert WireBuffer(wire, vectors).memory is vectors.memory


@pytest.mark.parametrize(("value", "overflows"), [(65519.0, False), (65520.0, True), (-1e6, True)])
def test_a_number_beyond_the_range_of_float16_is_noticed(value, overflows):
    layout = FlatLayout(Mixed())
    for wire, is_noticed in (("float16", overflows), ("bf16", False), ("float32", False)):
        vectors = layout.allocate()
        vectors.parameters[1][500] = value
        leaving = WireBuffer(WireFormat(wire, layout), vectors)
        leaving.pack()
        assert leaving.overflows(value * value) is is_noticed


def test_every_word_for_the_wire_has_a_type_and_others_are_refused(monkeypatch):
    assert tuple(DTYPES) == WIRES
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("PACELINE_TOKEN", "t")
    with pytest.raises(pl.UsageError, match=r"wire='fp8': .*; expected float32, bf16, float16, int8, int4 or top_k"):
        pl.Torchrun(wire="fp8")
    assert "wire='bf16'" in str(pl.Torchrun(wire="bf16"))


def served(optimizer, measure):
    """Yield a server and a way to make an update of a gradient that depends on the state."""
    job = tiny_job(model=partial(small_net, torch.float32), data=dataset(dtype=torch.float32), optimizer=optimizer)
    model = build_model(job, 3)
    layout = FlatLayout(model)
    server = ParameterServer(job, model, layout, None)

    def update(number, version=None):
        gradient = layout.allocate()
        for ours, state in zip(gradient.flat_parameters, server.state.flat_parameters, strict=True):
            ours.copy_(state).sin_()
        server.enqueue(gradient, 8)
        return server.apply(update_of(number, measure=measure), version)

    return server, layout, update


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), partial(torch.optim.Adam, lr=0.01)], ids=["sgd", "adam"])
def test_a_server_that_moves_goes_on_as_one_that_stays(optimizer):
    mover, layout, move_on = served(optimizer, measure=True)
    stayer, _, stay_on = served(optimizer, measure=True)
    for number in range(1, 5):
        left = mover.state
        before = left.memory.clone()
        assert move_on(number, layout.allocate()) == stay_on(number)
        assert torch.equal(left.memory, before)
        assert torch.equal(mover.state.memory, stayer.state.memory)
        assert all(torch.equal(*pair) for pair in zip(mover.model.parameters(), stayer.model.parameters(), strict=True))


@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_a_version_stays_while_it_is_held_and_else_is_updated_in_place(wire):
    server, layout, update = served(sgd(), measure=False)
    published = PublishedVersions(layout, WireFormat(wire, layout))
    server.publish(published.publish(0))
    places, held = [server.state], []
    for version in range(1, 7):
        is_held = version in {2, 3}
        if is_held:
            published.acquire(version - 1)
            travelling = published.packed(version - 1)
            held.append((travelling, travelling.clone()))
        assert sum(torch.equal(published.packed(version - 1), before) for _, before in held) == is_held
        assert published.is_newest_read is is_held
        update(version, published.publish(version))
        places.append(server.state)
        assert server.state is published[version]
        assert all(torch.equal(*pair) for pair in held)
    assert [places[i] is not places[i - 1] for i in range(1, 7)] == [False, True, True, False, False, False]
    for version in (1, 2):
        published.release(version)
    assert len(published) == 1
    assert published.free_storage() is not server.state
