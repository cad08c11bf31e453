"""Minibatches that background processes prepare change the time of a run and nothing else."""

from contextlib import closing, suppress
from functools import partial
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch import nn

import paceline as pl
from immediate_executor import ImmediateExecutor
from noisy_data import Deadly, Failing, Noisy, NoisyStream, Signed
from paceline.core.events import Minibatch, MinibatchSlice
from paceline.utils.rng import derived_seed
from paceline.worker import background_loader
from paceline.worker.background_loader import BackgroundLoader
from paceline.worker.data_loader import MinibatchLoader
from paceline.worker.minibatch_forecast import MinibatchForecast, UpcomingMinibatch
from paceline.worker.seeding import RandomStates, seeded
from ranks import run
from selections import parametrize_few
from tiny_jobs import parameters_of, tiny_job


def dropout_net():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


def noisy_job(**changes):
    return tiny_job(**{"model": dropout_net, "data": Noisy(), **changes})


def trained(job, protocol="bsp", n=3, updates=8, **settings):
    settings = {
        "cluster": pl.Cluster(n, timing=pl.timing.Exponential(1.0)),
        "stop": pl.Stop(updates=updates),
        **settings,
    }
    return parameters_of(pl.train(job, protocol=protocol, seed=5, **settings).model)


def started():
    """Return the processes that the fork server of this process has started and that still run."""
    found = set()
    for child in psutil.Process().children():
        for each in child.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found |= {each.pid} if each.status() != psutil.STATUS_ZOMBIE else set()
    return found


@pytest.fixture(autouse=True)
def _leaves_no_process():
    before = started()
    yield
    assert started() <= before


@pytest.fixture(autouse=True)
def _processes(request, monkeypatch):
    """Prepare minibatches in this process, unless a marker of the test allows processes."""
    if not {"processes", "slow"} & {marker.name for marker in request.node.iter_markers()}:
        monkeypatch.setattr(background_loader, "ProcessPoolExecutor", ImmediateExecutor)
        monkeypatch.setattr(background_loader, "init_child", lambda: None)


CASES = {
    "bsp": ("bsp", {}),
    "interrupts": ("k_sync(k=2)", {}),
    "asp in epochs": ("asp", {"sampling": "epoch"}),
    "iterable": ("asp", {"data": NoisyStream()}),
    "iterable with interrupts": ("k_sync(k=2)", {"data": NoisyStream()}),
    "partitioned epochs": ("bsp", {"sampling": "epoch", "sharding": "partitioned"}),
    "dc_s3gd": ("dc_s3gd", {}),
}


@parametrize_few(("protocol", "changes"), CASES.values(), keep=1, ids=CASES)
def test_every_simulated_engine_is_bit_identical(protocol, changes):
    ours = trained(noisy_job(loader_workers=2, **changes), protocol)
    assert torch.equal(ours, trained(noisy_job(**changes), protocol))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"data": NoisyStream()}], ids=["map-style", "iterable"])
def test_a_resumed_run_is_bit_identical(changes, tmp_path):
    whole = trained(noisy_job(**changes), "k_sync(k=2)")
    job = noisy_job(loader_workers=1, **changes)
    trained(job, "k_sync(k=2)", updates=4, out=tmp_path / "run")
    assert torch.equal(trained(job, "k_sync(k=2)", resume=tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.processes
def test_local_workers_are_bit_identical():
    ours = trained(noisy_job(loader_workers=1), cluster=pl.LocalCluster(1))
    assert torch.equal(ours, trained(noisy_job(), n=1))


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "size"), [("bsp", 2), ("dc_s3gd", 3)])  # one worker: sums follow the arrivals
def test_ranks_are_bit_identical(protocol, size):
    ours, theirs = (
        run(size, noisy_job(loader_workers=workers), protocol=protocol, stop="updates=8")[0].parameters
        for workers in (2, 0)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_rank_keeps_one_background_process_for_the_whole_run(tmp_path):
    size = 2
    run(size, noisy_job(data=Signed(tmp_path), loader_workers=1), protocol="dc_s3gd", stop="updates=8")
    readers = [tuple(map(int, path.name.split("-"))) for path in tmp_path.iterdir()]
    parents = {parent for parent, _ in readers}
    assert len({pid for _, pid in readers} - parents) == size, readers


def test_an_error_of_the_data_set_shows_its_traceback_and_the_minibatch():
    job = noisy_job(data=Failing(), loader_workers=1, sampling="epoch")
    with pytest.raises(pl.RunError) as error:
        trained(job)
    said = str(error.value)
    assert said.startswith("job tiny: the data set failed for worker ")
    assert "of epoch 0: KeyError: 'no such picture'" in said
    assert "noisy_data.py" in said


@pytest.mark.slow
def test_a_local_worker_whose_data_set_fails_ends_with_its_processes(caplog):
    job = noisy_job(data=Failing(), loader_workers=1, sampling="epoch")
    with pytest.raises(pl.RunError, match=r"^every worker failed, .*job tiny: the data set failed for worker 0, draw "):
        pl.train(job, protocol="bsp", cluster=pl.LocalCluster(1, respawn=False), stop="updates=20")
    assert "KeyError: 'no such picture'" in caplog.text


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_fork_server_killed_while_a_process_starts_is_a_one_line_error(error, monkeypatch):
    monkeypatch.setattr(background_loader, "ProcessPoolExecutor", Mock(side_effect=error))
    told = r"^cannot start a background process that prepares minibatches: .*forkserver\) was killed[^\n]*$"
    loader = BackgroundLoader(noisy_job(loader_workers=1), seed=1, n=1)
    with closing(loader), pytest.raises(pl.RunError, match=told):
        loader.batch(0, 1, None)


def test_a_process_starts_again_while_the_old_fork_server_is_ending(monkeypatch):
    refusals = [ConnectionRefusedError] * 2

    def refused_twice(*arguments, **options):
        if refusals:
            raise refusals.pop()
        return ImmediateExecutor(*arguments, **options)

    monkeypatch.setattr(background_loader, "ProcessPoolExecutor", refused_twice)
    with closing(BackgroundLoader(noisy_job(loader_workers=1), seed=1, n=1)) as loader:
        assert loader.batch(0, 1, None) is not None
    assert not refusals


@pytest.mark.slow
def test_a_killed_process_is_one_error():
    with pytest.raises(pl.RunError, match="job tiny: a background process that prepares minibatches ended"):
        trained(noisy_job(data=Deadly(), loader_workers=1, sampling="epoch", batch_size=4), updates=30)


def test_wrong_prefetches_only_cost_time():
    job = noisy_job(loader_workers=2, sampling="epoch")
    background, plain = BackgroundLoader(job, 1, 3), MinibatchLoader(job, 1, 3)
    asked = [
        UpcomingMinibatch(0, 1, Minibatch(0, 0, 0)),
        UpcomingMinibatch(2, 7, Minibatch(0, 3, 2)),
        UpcomingMinibatch(0, 9, Minibatch(0, 1, 11)),
    ]
    try:
        for piece in asked:
            background.prefetch([UpcomingMinibatch(1, 1, Minibatch(0, 0, 5))])
            for place, size in [(0, 1), (1, 3)]:
                made = []
                for loader in (background, plain):
                    with seeded(derived_seed(1, "gradient", piece.worker, piece.draw, *([place] if size > 1 else []))):
                        batch = loader.share(*piece, place, size) if size > 1 else loader.batch(*piece)
                        made.append((batch, RandomStates()))
                (ours, after), (theirs, expected) = made
                assert all(map(torch.equal, ours, theirs))
                assert after == expected
    finally:
        background.close()


def test_prefetches_are_exact_under_a_full_barrier():
    forecast, per_epoch = MinibatchForecast(3, 10), 10
    dealt = [UpcomingMinibatch(i % 3, i // 3 + 1, Minibatch(0, *divmod(i, per_epoch))) for i in range(60)]
    for i, piece in enumerate(dealt[:30]):
        forecast.observe(piece)
        if i >= 2:
            assert forecast.next(6) == dealt[i + 1 : i + 7]
    known = [dealt[32], dealt[31]]
    assert forecast.next(2, known) == known
    assert forecast.next(0) == []


def test_workers_with_their_own_draws_are_prefetched_in_turn():
    forecast = MinibatchForecast(2, None)
    for worker, draw in [(0, 1), (1, 1), (0, 2)]:
        forecast.observe(UpcomingMinibatch(worker, draw, None))
    assert forecast.next(3) == [
        UpcomingMinibatch(1, 2, None),
        UpcomingMinibatch(0, 3, None),
        UpcomingMinibatch(1, 3, None),
    ]
    assert forecast.is_past(UpcomingMinibatch(0, 2, None))
    assert not forecast.is_past(UpcomingMinibatch(1, 2, None))


def test_data_that_cannot_be_pickled_are_refused():
    job = noisy_job(loader_workers=1, collate=partial(max, key=(each for each in ())))
    with pytest.raises(pl.UsageError, match="data or collate cannot be sent to background processes: collate: its"):
        trained(job)


def test_processes_without_a_sample_of_a_small_share_have_no_batch():
    part = MinibatchSlice(worker=1, draw=4, epoch=0, number=2, begin=3, end=4)
    minibatch = Minibatch(0, 0, 5, slices=(part,), share=1 / 8)
    job = noisy_job(sampling="epoch", loader_workers=1)
    for loader in (BackgroundLoader(job, 0, 3), MinibatchLoader(job, 0, 3)):
        assert loader.share(0, 4, minibatch, rank=1, size=2) is None
