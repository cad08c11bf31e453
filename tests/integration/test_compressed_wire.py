"""Ranks that send compressed vectors, as threads: both ends agree, and training reaches the same loss."""

from functools import partialmethod

import pytest
import torch

import paceline as pl
from end_when import FOREVER, EndWhen
from paceline.compression import compiled_codec
from paceline.compression.compiled_codec import CompiledIntegerCodec
from paceline.core.records import GradientArrived, WorkerJoined
from paceline.core.wire import IntegerCode
from rank_threads import ranks, run
from ranks import flat, lost
from rounding import single_job
from selections import parametrize_few
from this_process import in_thread
from tiny_jobs import largest_relative_difference, parameters_of, sgd

CODES = ["int8", "int4", "top_k(share=0.1)"]
STOP = "updates=24"


@parametrize_few(("protocol", "wire"), [*(("bsp", wire) for wire in CODES), ("bsp + local_steps(H=3)", "int8")], keep=1)
def test_both_ends_have_the_same_version_as_in_the_simulation(protocol, wire, tmp_path):
    job = single_job()
    settings = {"protocol": protocol, "stop": STOP}
    ends = run(3, job, {"wire": wire, "debug": True}, **settings, out=tmp_path / "run")  # compares checksums
    simulated, exact = (
        parameters_of(pl.train(job, cluster=pl.Cluster(2, network=network), seed=1, **settings).model)
        for network in (pl.timing.Network(wire=wire), pl.timing.Network())
    )
    to_rounded, to_exact = (largest_relative_difference(flat(ends[0].parameters), each) for each in (simulated, exact))
    assert 1e-6 < to_exact < {"int8": 0.02, "int4": 0.2, "top_k(share=0.1)": 0.5}[wire]
    assert to_rounded < to_exact / 4  # mostly 1e-7; the order of arrivals rounds a mean, which may change a code
    assert all(torch.equal(flat(end.parameters), flat(ends[0].parameters)) for end in ends)
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["k_async(k=2)", "bsp + local_steps(H=3)"])
def test_protocols_run_compressed_on_shards_and_a_worker_that_comes_back_gets_a_whole_version(protocol):
    torchrun = {"wire": "int8", "shards": 2, "faults": [pl.Fault(worker=1, draw=4)]}
    is_back = EndWhen(lambda seen: seen.joined and seen.used_since[1] > 3)
    settings = {"protocol": protocol, "stop": FOREVER, "callbacks": [is_back]}
    with ranks(3, single_job(optimizer=sgd(lr=0.2)), torchrun, **settings) as job:

        def start_again():
            job.join(2)
            job.start(2)

        job.start_workers()
        acting, raised = in_thread(start_again)
        end = job.serve()
        acting.join()
        assert raised == []
        assert job.faults("die") == 1
    assert [worker for worker, _ in lost(end)] == [1]
    assert [record.worker for record in end.of(WorkerJoined)] == [1]
    losses = [record.loss for record in end.of(GradientArrived) if record.used and record.worker == 1]
    assert max(losses) < 2.0  # log(3) = 1.1 before training


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_nothing_behind():
    faults = [pl.Fault(worker=1, draw=7, kind="not_finite")]
    [end, *_] = run(3, single_job(), {"wire": "int8", "faults": faults}, protocol="bsp", stop=STOP)
    assert [record.worker for record in end.of(GradientArrived) if record.reason == "not finite"] == [1]
    assert torch.isfinite(flat(end.parameters)).all()


BY_A_SERVER, BY_A_WORKER = {"compress_difference", "decompress"}, {"compress", "add_difference"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "used"),
    [
        ("bsp", BY_A_SERVER),
        ("bsp + local_steps(H=2)", BY_A_SERVER | BY_A_WORKER),
        ("all_reduce", {"compress", "decompress"}),
    ],
)
def test_processes_that_step_use_compiled_loops_which_change_no_bit(protocol, used, monkeypatch):
    pytest.importorskip("numba")
    settings = {"protocol": protocol, "stop": "updates=8"}
    plain, *_ = run(2, single_job(), {"wire": "int8"}, **settings)
    calls = set()

    def recorded(codec, chunks, name, inner):
        calls.add(name)
        inner(codec, chunks)

    for name in ("compress", "compress_difference", "decompress", "add_difference"):
        inner = getattr(CompiledIntegerCodec, name)
        monkeypatch.setattr(CompiledIntegerCodec, name, partialmethod(recorded, name=name, inner=inner))
    compiled_codec._compiled_codec(IntegerCode(127))  # is compared with torch
    calls.clear()
    monkeypatch.setattr(compiled_codec, "LEAST", 1)
    ours, *_ = run(2, single_job(), {"wire": "int8"}, **settings)
    assert calls == used
    assert torch.equal(flat(ours.parameters), flat(plain.parameters))
