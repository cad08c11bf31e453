"""Simulated runs with compressed messages: their bytes and times, their state, and workers that come back."""

import pytest
import torch

import paceline as pl
from paceline.core.records import GradientArrived, WorkerJoined, WorkerLost
from paceline.core.wire import parse_wire
from paceline.engines.virtual.compressed_transfers import CompressedTransfers
from paceline.tensors.flat_buffers import FlatLayout
from rounding import single_job
from tiny_jobs import parameters_of, sgd

WIRE = pl.timing.Network(latency_s=0.1, up_bytes_per_s=2000, down_bytes_per_s=4000, wire="int8")
PROTOCOLS = ["k_sync(k=2)", "bsp + local_steps(H=2)", "local_sgd(H=4, fragments=2, lag=2)"]


def test_a_code_shortens_transfers_and_sums():
    share = 1 / 4 + 1 / 256
    assert WIRE.sent_bytes(1000) == pytest.approx(1000 * share)
    assert WIRE.pull_s(1000) == pytest.approx(0.1 + 1000 * share / 4000)
    assert WIRE.push_s(1000) == pytest.approx(0.1 + 1000 * share / 2000)
    assert WIRE.all_reduce_s(5, 1000) == pytest.approx(4 * (0.1 + 1000 * share / 2000))
    simulated = pl.simulate(
        "bsp", pl.Cluster(2, pl.timing.Deterministic(1.0), network=WIRE), updates=3, payload_bytes=1000
    )
    assert simulated.bytes_up == pytest.approx(6 * 1000 * share)
    assert simulated.time_s == pytest.approx(3 * (1 + WIRE.pull_s(1000) + WIRE.push_s(1000)))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_resumed_run_is_bit_identical(protocol, tmp_path):
    job = single_job(optimizer=sgd(0.05, 0.9))
    settings = {"protocol": protocol, "cluster": pl.Cluster(3, network=WIRE), "seed": 3}
    whole = pl.train(job, stop="updates=24", **settings)
    pl.train(job, stop="updates=11", out=tmp_path / "run", checkpoint_every="updates=1", **settings)
    resumed = pl.train(job, stop="updates=24", resume=tmp_path / "run", **settings)
    assert torch.equal(parameters_of(resumed.model), parameters_of(whole.model))
    plain = pl.train(job, stop="updates=24", **{**settings, "cluster": pl.Cluster(3)})
    assert not torch.equal(parameters_of(whole.model), parameters_of(plain.model))
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
def test_a_worker_that_comes_back_receives_a_whole_version(monkeypatch):
    forgotten, forget = [], CompressedTransfers.forget

    def record(transfers, worker):
        forgotten.append(worker)
        forget(transfers, worker)

    monkeypatch.setattr(CompressedTransfers, "forget", record)
    cluster = pl.Cluster(3, network=WIRE, faults=[pl.Fault(worker=1, draw=4, kind="die", back_after_s=5.0)])
    run = pl.train(single_job(optimizer=sgd(0.1)), protocol="asp", cluster=cluster, stop="updates=120", seed=3)
    assert [each.worker for each in run.history.of(WorkerLost)] == [1]
    assert [each.worker for each in run.history.of(WorkerJoined)] == [1]
    assert forgotten == [1]


def test_a_worker_has_what_its_messages_brought():
    layout = FlatLayout(torch.nn.Linear(100, 30))
    transfers, versions = CompressedTransfers(parse_wire("int4"), layout), [layout.allocate() for _ in range(3)]
    for version in versions:
        version.flat_parameters[0].copy_(torch.randn(3030))
    for number, version in enumerate(versions):
        transfers.receive(0, number, version)
        left_out = (version.flat_parameters[0] - transfers.received(0).flat_parameters[0]).abs().max()
        assert (left_out == 0) == (number == 0)  # the first one is whole
    again = transfers.received(0).memory.clone()
    transfers.receive(0, 2, versions[2])  # it has this version
    assert torch.equal(transfers.received(0).memory, again)
    transfers.forget(0)
    transfers.receive(0, 2, versions[2])
    assert torch.equal(transfers.received(0).memory, versions[2].memory)


def test_what_a_message_leaves_out_is_in_a_later_one():
    layout = FlatLayout(torch.nn.Linear(100, 30))
    transfers, gradient = CompressedTransfers(parse_wire("top_k(share=0.1)"), layout), layout.allocate()
    total = torch.zeros(3030)
    for number in range(40):
        gradient.flat_parameters[0].fill_(1.0)
        transfers.send(0, gradient)
        total += gradient.flat_parameters[0]
        assert (gradient.flat_parameters[0] != 0).float().mean() == pytest.approx(0.1, abs=0.01), number
    assert float((40 - total).min()) >= 0
    assert float((40 - total).max()) <= 11  # each value waits for at most ten messages


@pytest.mark.parametrize(("wire", "says"), [("bf16", "is not simulated; give float32"), ("int9", "expected float32")])
def test_other_formats_are_refused(wire, says):
    with pytest.raises(pl.UsageError, match=says):
        pl.timing.Network(wire=wire)


def test_a_code_on_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(pl.UsageError, match="wire='int8' is simulated on the CPU; omit device='cuda'"):
        pl.Cluster(2, network=WIRE, device="cuda")


def test_a_dropped_gradient_was_sent(monkeypatch):
    sent, send = [], CompressedTransfers.send

    def record(transfers, worker, vectors, fragment=None):
        sent.append(worker)
        send(transfers, worker, vectors, fragment)

    monkeypatch.setattr(CompressedTransfers, "send", record)
    run = pl.train(single_job(), protocol="pull(k=2)", cluster=pl.Cluster(3, network=WIRE), stop="updates=20", seed=3)
    arrived = list(run.history.of(GradientArrived))
    assert any(not each.used for each in arrived)
    assert sent == [each.worker for each in arrived]
