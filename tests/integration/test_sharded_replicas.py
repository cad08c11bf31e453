"""Workers that are groups of ranks, of which each has a shard of the model: their updates, deaths and returns."""

import itertools
import random
import shutil
import threading
import time
from math import inf

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from attached_threads import LIMIT_S, AttachedThreads
from machine_speed import scaled
from paceline.core.records import UpdateMade, WorkerJoined, WorkerLost

SIZE, WORKERS, BATCH, SAMPLES = 2, 2, 6, 288
SHAPES = [(6, 3), (6,)]  # of the whole parameters, whose rows the ranks of a worker share
EXACT = 1e-12
WAIT_S = scaled(30)  # for the other ranks of a worker
EPOCHS, LAST_STEPS = 6, 20  # of the runs with deaths; of worker 0, before the others have to be back
BASE = 64  # of the digits that count the samples of each epoch


class Shards(nn.Module):
    """Shard of the parameters of a model, with the place of its rank."""

    def __init__(self, whole, rank, size=SIZE):
        super().__init__()
        self.rank, self.size = rank, size
        rows = [len(each) // size for each in whole]
        shard = rank % size
        self.parts = nn.ParameterList(
            nn.Parameter(each[shard * count : (shard + 1) * count].clone())
            for each, count in zip(whole, rows, strict=True)
        )


class Sharing:
    """Exchange between the ranks of a worker, in place of the collectives of `fully_shard`."""

    def __init__(self, size=SIZE):
        self._size = size
        self._barrier = threading.Barrier(size)
        self._values = [None] * size

    def gather(self, rank, value):
        self._values[rank % self._size] = value
        self._barrier.wait(WAIT_S)
        values = list(self._values)
        self._barrier.wait(WAIT_S)
        return values

    def break_off(self):
        self._barrier.abort()


def whole_parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64),
        torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64),
    )


def loss_of(parameters, x, y):
    weight, bias = parameters
    return mse_loss(torch.tanh(x @ weight.T + bias), y)


def numbered():
    return TensorDataset(torch.arange(SAMPLES), torch.arange(SAMPLES))


def count_of(parameters, x, y):
    """Return a loss whose gradient counts each sample in a parameter of its own."""
    return parameters[0][x].mean()


def counting(parameters):
    return torch.optim.SGD(parameters, lr=6.0 * SIZE * BATCH)


def digits_of(counts):
    """Return twice the sums of 3 / (gradients of the update) over the updates with each sample, epoch by epoch."""
    whole = (-counts * BASE ** (EPOCHS - 1)).round().long()
    return {int(whole[i] // BASE**epoch % BASE) for i in range(len(whole)) for epoch in range(EPOCHS)}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Ranks(AttachedThreads):
    """Ranks of several workers; each other worker begins with other parameters, which do not count."""

    def __init__(self, protocol, make_optimizer=sgd, workers=WORKERS, counts=False, size=SIZE, **settings):
        self.size = size
        batch_size = BATCH * SIZE // size  # a minibatch of all ranks of a worker stays as it is
        numbers = itertools.count()
        self.loss_of = count_of if counts else loss_of
        samples = numbered() if counts else data()
        first = [torch.zeros(SAMPLES).double()] if counts else whole_parameters()
        self.sharing = [Sharing(size) for _ in range(workers)]
        self._killed = threading.local()

        def make_parts():
            rank = getattr(self._killed, "rank", None)
            rank = next(numbers) if rank is None else rank
            whole = first if rank < size else [torch.ones_like(each) for each in first]
            model = Shards(whole, rank, size)
            model.sharing = self.sharing[rank // size]  # a process that starts again has another one
            return model, make_optimizer(model.parameters()), DataLoader(samples, batch_size=batch_size, shuffle=True)

        super().__init__(workers * size, make_parts, protocol, server=False, group_size=size, **settings)

    def lose(self, rank):
        """End a rank, and let the others of its worker find that when they next share something."""
        sharing, self.sharing[rank // SIZE] = self.sharing[rank // SIZE], Sharing()
        sharing.break_off()
        self.die(rank)

    def die(self, rank):
        """End a rank, which starts again."""
        self._killed.rank = rank
        self.kill(rank, is_restarted=True)

    def compute(self, model, x, y, scale=1.0):
        """Compute what `fully_shard` does: the shard of the mean gradient of the worker's ranks."""
        sharing = model.sharing
        parts = sharing.gather(model.rank, [each.detach().clone() for each in model.parts])
        whole = [torch.cat(shards).requires_grad_() for shards in zip(*parts, strict=True)]
        loss = scale * self.loss_of(whole, x, y)
        gradients = torch.autograd.grad(loss, whole)
        of_ranks = sharing.gather(model.rank, gradients)
        for number, parameter in enumerate(model.parts):
            mean = sum(each[number] for each in of_ranks) / self.size
            start = model.rank % self.size * len(parameter)
            parameter.grad = mean[start : start + len(parameter)].clone()
        return loss

    def whole(self, worker):
        """Return the parameters of a worker."""
        models = [model for model, _, _ in self.parts if model.rank // self.size == worker]
        return [torch.cat(shards).detach() for shards in zip(*(model.parts for model in models), strict=True)]


def loop_of(ranks, epochs=2):
    def loop(run, model, optimizer):
        steps = []
        for _ in run.epochs(epochs):
            for x, y in run.loader:
                optimizer.zero_grad()
                ranks.compute(model, x, y)
                run.weight(len(x))  # of a loss that `backward` does not see here
                optimizer.step()
                steps.append((x, y))
        return steps

    return loop


def zip_of(steps):
    """Return the batches of all ranks in each of their steps."""
    return list(zip(*steps, strict=True))


def expected(updates, make_optimizer, clip_norm=None):
    """Return the parameters after updates by the mean gradient of the batches of all ranks."""
    parameters = [each.requires_grad_() for each in whole_parameters()]
    optimizer = make_optimizer(parameters)
    for batches in updates:
        optimizer.zero_grad()
        for x, y in batches:
            (loss_of(parameters, x, y) / len(batches)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    return parameters


def await_all(are_there):
    deadline_s = time.monotonic() + LIMIT_S / 2
    while not are_there():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def distance(ours, theirs):
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("make_optimizer", "clip_norm"), [(sgd, 0.05), (adamw, None)])
def test_bsp_steps_by_the_mean_gradient_of_all_ranks(make_optimizer, clip_norm):
    ranks = Ranks("bsp", make_optimizer, clip_norm=clip_norm)
    steps = ranks.run_well(loop_of(ranks))
    assert {len(each) for each in steps} == {2 * SAMPLES // BATCH // WORKERS // SIZE}
    assert all(len(x) == BATCH for x, _ in steps[0]), "each rank of a worker has a batch of its own"
    assert distance(ranks.whole(0), expected(zip_of(steps), make_optimizer, clip_norm)) < EXACT
    assert all(map(torch.equal, ranks.whole(0), ranks.whole(1))), "all workers have the same bits"


@pytest.mark.parametrize("protocol", ["balanced(m=3)", "balanced(m=2, leases=1)"])
def test_balanced_steps_as_bsp(protocol):
    settings = {"clip_norm": 0.05, "make_optimizer": adamw}
    ours, theirs = Ranks(protocol, **settings), Ranks("bsp", **settings)
    for each in (ours, theirs):
        each.run_well(loop_of(each))
    assert distance(ours.whole(0), theirs.whole(0)) < EXACT
    assert all(map(torch.equal, ours.whole(0), ours.whole(1))), "all workers have the same bits"


@pytest.mark.parametrize("protocol", ["dbw", "adasync", "auto(fresh=true,m=0)"])
def test_policies_decide_over_groups(protocol):
    def loop(run, model, optimizer):
        steps = 0
        for _ in run.epochs(2):
            for x, y in run.loader:
                optimizer.zero_grad()
                loss = ranks.compute(model, x, y).detach()
                run.backward(loss + 0 * sum(each.sum() for each in model.parts))  # the policies need the loss
                run.weight(len(x))
                optimizer.step()
                steps += 1
        return steps

    ranks = Ranks(protocol)
    steps = ranks.run_well(loop)
    assert all(map(torch.equal, ranks.whole(0), ranks.whole(1))), "all workers have the same bits"
    assert steps[0] == steps[1], "the ranks of a worker step together"
    assert steps[2] == steps[3]
    assert sum(steps) >= 2 * SAMPLES // BATCH


def drawn_deaths(seed):
    """Return the step at which one rank of each worker but the first ends."""
    numbers = random.Random(seed)
    return {numbers.choice([2, 3]): numbers.randrange(1, 8), numbers.choice([4, 5]): numbers.randrange(1, 8)}


DRAWN = [
    pytest.param(protocol, drawn_deaths(seed), marks=pytest.mark.slow)
    for protocol in ("bsp", "balanced(m=3)")
    for seed in range(5)
]


@pytest.mark.parametrize(
    ("protocol", "deaths"), [*((each, {2: 3, 5: 6}) for each in ("bsp", "k_sync(k=2)", "balanced(m=3)")), *DRAWN]
)
def test_a_worker_that_loses_a_rank_comes_back_with_the_shards_of_a_living_one(protocol, deaths):
    died, ended, back = [], set(), set()

    def loop(run, model, optimizer):
        try:
            return train(run, model, optimizer)
        except (pl.RunError, threading.BrokenBarrierError):
            ended.add(model.rank)
            ranks.die(model.rank)  # as a process does that ends with this error

    def train(run, model, optimizer):
        steps = 0
        for _ in run.epochs(EPOCHS):
            for x, y in run.loader:
                back.update({model.rank} & ended)
                if model.rank < SIZE and steps == LAST_STEPS:
                    await_all(lambda: len(back) == 2 * SIZE)
                optimizer.zero_grad()
                ranks.compute(model, x, y, scale=float(BASE) ** -run._tasks.task.epoch)
                run.weight(len(x))
                is_due = steps >= deaths.get(model.rank, inf) and len(back) == SIZE * len(died)  # one after the other
                if is_due and model.rank not in died:
                    died.append(model.rank)
                    ended.add(model.rank)
                    ranks.lose(model.rank)
                optimizer.step()
                steps += 1
        return steps

    ranks = Ranks(protocol, counting, workers=3, counts=True)
    answers = ranks.run(loop)
    assert all(isinstance(each, int) for each in answers), answers
    assert sorted(died) == sorted(deaths)
    history = ranks.server.result.history
    assert sorted(each.worker for each in history.of(WorkerLost)) == [1, 2], [*history.of(WorkerLost)]
    assert sorted(each.worker for each in history.of(WorkerJoined)) == [1, 2]
    first, *others = [ranks.whole(worker) for worker in range(3)]
    for other in others:
        assert all(map(torch.equal, first, other)), "all workers have the same bits"
    # Of one update of k gradients it is 6 / k; of two updates that have at least two gradients it is 4 at least.
    if protocol == "bsp":
        assert digits_of(*first) <= {6 // each.k for each in history.of(UpdateMade)}, "each sample counts once an epoch"
    elif protocol == "balanced(m=3)":  # whose updates have the samples of three minibatches
        assert digits_of(*first) == {6 // 3}, "each sample counts once an epoch"


def test_weights_that_differ_within_a_worker_are_refused():
    ranks = Ranks("bsp")

    def loop(run, model, optimizer):
        for _ in run.epochs(1):
            for x, y in run.loader:
                ranks.compute(model, x, y)
                run.weight(len(x) + model.rank % SIZE)
                optimizer.step()

    with pytest.raises(pl.UsageError, match="have different weights"):
        ranks.run(loop)


@pytest.mark.parametrize(("stop", "size"), [("updates=7", SIZE), ("updates=1", SIZE), ("updates=6", 3)])
def test_a_resumed_run_goes_on_with_the_shards_that_the_ranks_have_saved(stop, size, tmp_path):
    run = tmp_path / "run"
    before = Ranks("bsp", adamw, stop=stop, out=run, checkpoint_every="updates=3")
    steps = before.run_well(loop_of(before))
    assert len(steps[0]) == int(stop.removeprefix("updates="))
    assert not (run / "model.safetensors").exists(), "no process has a whole model"
    resumed = Ranks("bsp", adamw, stop="epochs=2", size=size, resume=run)
    after = resumed.run_well(loop_of(resumed))
    parameters = expected([*zip_of(steps), *zip_of(after)], adamw)
    assert distance(resumed.whole(0), parameters) < EXACT
    assert all(map(torch.equal, resumed.whole(0), resumed.whole(1))), "all workers have the same bits"
    assert pl.replay(run).is_same


def test_a_lost_shard_is_named(tmp_path):
    run = tmp_path / "run"
    before = Ranks("bsp", stop="updates=3", out=run)
    before.run_well(loop_of(before))
    shutil.rmtree(run / "shards" / f"1-of-{SIZE}")
    resumed = Ranks("bsp", stop="epochs=2", resume=run)
    with pytest.raises(pl.RunError, match="has no shard of update 3"):
        resumed.run(loop_of(resumed))
