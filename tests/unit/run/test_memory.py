"""Memory that a run needs, against a count by hand and the memory that simulated workers hold."""

import gc

import pytest
import torch

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.run.memory import vectors_of
from selections import parametrize_few
from tiny_jobs import tiny_job


def test_copies_of_the_receivers_and_the_states_of_local_steps_count():
    bsp, local = parse_plan("bsp"), parse_plan("bsp + local_steps(H=4)")
    assert vectors_of(bsp, 4, is_compressed=True) == vectors_of(bsp, 4) + 4
    assert vectors_of(local, 4) == vectors_of(bsp, 4) + 4 * 2 * 2


def test_local_steps_are_refused_where_their_optimizers_do_not_fit(monkeypatch):
    class Memory:
        available = 20 * 1_000  # bytes

    model = torch.nn.Linear(5, 40).double()  # 1,920 bytes
    monkeypatch.setattr("psutil.virtual_memory", Memory)
    settings = {"cluster": pl.Cluster(2), "stop": "updates=1"}
    pl.train(tiny_job(model=lambda: model), protocol="bsp", **settings)
    with pytest.raises(pl.UsageError, match=r"MiB with gradients and the states of optimizers, but .* are available"):
        pl.train(tiny_job(model=lambda: model), protocol="bsp + local_steps(H=2)", **settings)


def live_bytes(least):
    """Return the bytes of all tensors of this process that have more than so many."""
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) in (torch.Tensor, torch.nn.Parameter)  # not what a compiler has left
    }
    return sum(nbytes for nbytes in storages.values() if nbytes > least)


def held_vectors(protocol, n, elements):
    """Return how many vectors of so many elements a run has at its end."""
    live, before = [], live_bytes(elements)  # of other tests

    class Count(pl.callbacks.Callback):
        def on_record(self, record):
            if isinstance(record, pl.callbacks.UpdateMade) and record.version == 8:
                live.append((live_bytes(elements) - before) / (4 * elements))

    job = tiny_job()
    job = pl.Job(
        name="wide",
        model=lambda: torch.nn.Linear(5, elements // 6),
        optimizer=torch.optim.Adam,
        data=torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randint(3, (40,))),
        batch_size=4,
        loss=job.loss,
    )
    pl.train(job, protocol=protocol, cluster=pl.Cluster(n), stop="updates=9", callbacks=[Count()])
    return live[0]


@parametrize_few(
    "protocol",
    ["asp", "bsp + local_steps(H=2)", "local_sgd(H=4)", "local_sgd(H=4, lag=4)", "dc_s3gd(lag=3)", "all_reduce"],
    keep=1,
)
def test_a_simulated_run_holds_at_most_these_vectors(protocol):
    n, elements = 4, 60_000
    expected = vectors_of(parse_plan(protocol), n)
    assert 0.5 * expected < held_vectors(protocol, n, elements) <= expected + 4  # the replica has its own


def test_a_protocol_that_waits_for_all_workers_has_one_version():
    assert held_vectors("asp", 8, 60_000) >= held_vectors("bsp", 8, 60_000) + 4
