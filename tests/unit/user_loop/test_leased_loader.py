"""The loader of an attached run: the batches are those of the leases, loaded ahead by the processes of the user."""

import time
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from attached_threads import AttachedThreads
from paceline.core.events import Minibatch
from paceline.user_loop.data.ahead_loader import AheadLoader
from paceline.user_loop.data.dealt_batches import DealtBatches
from paceline.user_loop.data.loop_data import LoopData, UserLoop
from paceline.user_loop.worker.exchange import LoopTask
from selections import parametrize_few
from tiny_jobs import tiny_job

BATCH = 4


class Numbers(Dataset):
    """Numbers that take a time to load; number `bad` fails."""

    def __init__(self, count, load_s=0.0, bad=None):
        self.count, self.load_s, self.bad = count, load_s, bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.load_s / BATCH)
        if index == self.bad:
            raise ValueError(f"number {index} is bad")
        return torch.tensor([float(index)], dtype=torch.float64)


def collate(samples):
    """Return the samples and the number of the process that has loaded them."""
    info = torch.utils.data.get_worker_info()
    return torch.stack(samples), -1 if info is None else info.id


def make_parts(count=20, load_s=0.0, **settings):
    def parts():
        torch.manual_seed(0)
        model = nn.Linear(1, 1).double()
        loader = DataLoader(
            Numbers(count, load_s), **{"batch_size": BATCH, "shuffle": True, "collate_fn": collate, **settings}
        )
        return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.5), loader

    return parts


def train(epochs=2, accumulate=1, step_s=0.0):
    """Return a loop that returns its batches, the processes that loaded them, and the times between its steps."""

    def loop(run, model, optimizer):
        batches, processes, steps_s = [], set(), [time.monotonic()]
        for _ in run.epochs(epochs):
            for number, (x, process) in enumerate(run.loader, 1):
                torch.nn.functional.dropout(model(x), 0.2).square().mean().backward()
                batches.append([int(each) for each in x])
                processes.add(process)
                if number % accumulate == 0:
                    time.sleep(step_s)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps_s.append(time.monotonic())
        return batches, processes, [after - before for before, after in pairwise(steps_s)]

    return loop


def trained(count, make_parts, protocol="bsp", accumulate=1, out=None, **loop):
    ranks = AttachedThreads(count, make_parts, protocol, accumulate=accumulate, out=out)
    answers = ranks.run(train(accumulate=accumulate, **loop))
    assert not [each for each in answers if isinstance(each, BaseException)], answers
    return ranks, answers


def applied(answers):
    return Counter(number for batches, _, _ in answers for batch in batches for number in batch)


@pytest.mark.parametrize(("count", "drop_last", "accumulate"), [(10, False, 1), (10, True, 1), (11, False, 2)])
@parametrize_few("protocol", ["bsp", "k_batch_async(k=2)"], keep=1)
def test_an_epoch_has_the_last_incomplete_minibatch_unless_it_is_dropped(count, drop_last, accumulate, protocol):
    ranks, answers = trained(2, make_parts(count, drop_last=drop_last, shuffle=False), protocol, accumulate)
    expected = count // BATCH * BATCH if drop_last else count
    assert applied(answers) == dict.fromkeys(range(expected), 2)
    sizes = [each.samples for each in ranks.server.result.history.of(pl.callbacks.GradientArrived)]
    assert Counter(sizes)[count % (BATCH * accumulate)] == (0 if drop_last else 2)


def test_samples_too_few_for_the_batches_of_a_step_are_left_out():
    _, answers = trained(1, make_parts(9, shuffle=False), accumulate=2)
    assert applied(answers) == dict.fromkeys(range(8), 2)


def ahead_loader(loader, accumulate=1):
    """Return the loader of a rank that is dealt minibatches of samples in their order."""
    loop = UserLoop(model=None, optimizer=None, loader=loader, accumulate=accumulate, clip_norm=None)
    job = tiny_job(**without_the_rest(LoopData.of_loop(loop).job_settings()))
    return AheadLoader(loader, DealtBatches(job, 0, loader, accumulate), 0)


def without_the_rest(settings):
    return {name: settings[name] for name in ("data", "sampler", "sampling", "batch_size")}


def task_of(number, upcoming=()):
    upcoming = tuple(Minibatch(0, 0, each) for each in upcoming)
    return LoopTask(minibatch=Minibatch(0, 0, number), upcoming=upcoming, model=nn.Identity(), gradient=None)


def check_tasks(workers, tasks, accumulate=1):
    loader = ahead_loader(DataLoader(Numbers(1000), BATCH, num_workers=workers), accumulate)
    for number, *upcoming in tasks:
        task = task_of(number, upcoming)
        batches = list(loader.batches(task))
        size = BATCH * accumulate
        assert len(batches) == accumulate
        assert torch.cat(batches).flatten().tolist() == list(range(number * size, (number + 1) * size))
        assert loader.samples(task) == size


CHANGED = [(0, 1, 2, 3, 4), (1, 2, 3, 4, 5), (4, 6, 7), (8,), (6, 7, 9), (8, 1), (10,), (11,), (7, 9, 11, 12, 13)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_batches_are_those_of_the_task_without_processes(accumulate):
    check_tasks(0, CHANGED, accumulate)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_that_have_gone_to_another_rank_are_discarded(accumulate):
    random = Random(1)
    others = [random.sample(range(30), random.randint(1, 6)) for _ in range(60)]
    check_tasks(2, CHANGED + others, accumulate)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("protocol", ["bsp", "bsp + local_steps(H=3)"])
def test_a_run_with_processes_is_equal_to_one_without_and_is_replayed(protocol, accumulate, tmp_path):
    models = []
    for workers in (0, 2):
        parts = make_parts(18, num_workers=workers)
        out = tmp_path / str(workers)
        ranks, [(batches, processes, _)] = trained(1, parts, protocol, accumulate, out, epochs=3)
        assert processes == ({0, 1} if workers else {-1})
        models.append((batches, ranks.parts[0][0].weight.tolist()))
        assert pl.replay(out).is_same
    assert models[0] == models[1]


@pytest.mark.slow
@pytest.mark.processes
def test_loading_overlaps_with_the_steps():
    seconds = {}
    for workers in (0, 2):
        _, [(_, _, steps_s)] = trained(1, make_parts(80, load_s=0.05, num_workers=workers), epochs=1, step_s=0.05)
        seconds[workers] = sorted(steps_s[4:])[len(steps_s[4:]) // 2]
    assert seconds[0] > 0.1
    assert seconds[2] < seconds[0] - 0.03, "loading takes no time of the loop"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("protocol", ["asp", "k_sync(k=2)", "k_batch_async(k=3)", "asp + local_steps(H=4)"])
def test_with_processes_on_several_ranks_every_sample_is_used(protocol, tmp_path):
    ranks, answers = trained(3, make_parts(50, num_workers=2), protocol, out=tmp_path / "run", epochs=3)
    counts = applied(answers)
    assert set(counts) == set(range(50))
    assert min(counts.values()) >= 3  # more often where a gradient was dropped
    assert ranks.server.result.history.totals.samples_used == 150
    assert pl.replay(tmp_path / "run").is_same


@pytest.mark.slow
@pytest.mark.processes
def test_an_error_of_the_data_set_ends_the_loop_with_its_message():
    loader = ahead_loader(DataLoader(Numbers(1000, bad=6), BATCH, num_workers=2))
    assert list(loader.batches(task_of(0, [1, 2])))
    with pytest.raises(ValueError, match="number 6 is bad"):
        list(loader.batches(task_of(1, [2])))
    [batch] = loader.batches(task_of(2))
    assert batch.flatten().tolist() == [8, 9, 10, 11]
