"""Data of each rank: iterable data, and loops that draw their data without a loader."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

import paceline as pl
from allreduce_loops import AllReduceLoops
from attached_threads import AttachedThreads
from loop_parts import BATCH, SAMPLES, loss_of, make_network, numbered_data, sgd

RANKS, EXACT = 2, 1e-12


class Stream(IterableDataset):
    """Samples of a rank, which are read in sequence."""

    def __init__(self, start, length=SAMPLES):
        self.start = start
        self.length = length

    def __iter__(self):
        return iter(range(self.start, self.start + self.length))


def streams(length=11):
    starts = iter(range(0, 1000, 100))
    return lambda: make_stepping(DataLoader(Stream(next(starts), length), batch_size=2))


def make_stepping(loader=None):
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=1e-6), loader


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        ("bsp", AttachedThreads),
        ("k_sync(k=1)", AttachedThreads),
        ("bsp + local_steps(H=2)", AttachedThreads),
        ("all_reduce", AllReduceLoops),
    ],
)
def test_each_rank_reads_its_own_stream(protocol, kind):
    def loop(run, model, optimizer):
        epochs = []
        while not run.over:
            epochs.append([])
            for x in run.loader:
                epochs[-1].append(x.tolist())
                model(x.double()[:, None]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return epochs

    ranks = kind(RANKS, streams(), protocol, stop="gradients=40")
    answers = ranks.run(loop)
    for rank, epochs in enumerate(answers):
        whole = [[100 * rank + i, 100 * rank + i + 1] for i in range(0, 10, 2)] + [[100 * rank + 10]]
        assert len(epochs) > 1
        assert all(epoch == whole for epoch in epochs[:-1])
        assert epochs[-1] == whole[: len(epochs[-1])]


def test_batches_of_a_step_that_are_not_whole_at_the_end_of_a_stream_are_left_out():
    def loop(run, model, optimizer):
        batches = []
        for x in run.loader:
            batches.append(len(x))
            model(x.double()[:, None]).square().mean().backward()
            if len(batches) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return batches

    ranks = AttachedThreads(1, streams(), "bsp", stop="gradients=100", accumulate=2)
    assert ranks.run(loop) == [[2, 2, 2, 2, 2, 1]]
    sizes = [each.samples for each in ranks.server.result.history.of(pl.callbacks.GradientArrived)]
    assert sizes == [4, 4, 3]


class Stateful(DataLoader):
    """DataLoader that can go on from a batch, as torchdata's."""

    begun = drawn = 0

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number < self.begun:
                continue
            self.drawn = number + 1
            yield batch
        self.begun = self.drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn, "of": (torch.tensor([self.drawn]), None)}

    def load_state_dict(self, state):
        self.begun = self.drawn = state["drawn"]
        assert state["of"][0].tolist() == [self.drawn]


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_a_loader_with_a_state_goes_on_after_a_resume(protocol, tmp_path):
    def loop(run, model, optimizer):
        seen = []
        while not run.over:
            for x in run.loader:
                seen.append(x.tolist())
                model(x.double()[:, None]).square().mean().backward()
                optimizer.step()
        return seen

    def parts():
        starts = iter(range(0, 1000, 100))
        return lambda: make_stepping(Stateful(Stream(next(starts), 1000), batch_size=2))

    first = AttachedThreads(RANKS, parts(), protocol, stop="gradients=11", out=tmp_path / "run").run(loop)
    later = AttachedThreads(RANKS, parts(), protocol, stop="gradients=20", resume=tmp_path / "run").run(loop)
    for rank, (before, after) in enumerate(zip(first, later, strict=True)):
        expected = [[100 * rank + 2 * i, 100 * rank + 2 * i + 1] for i in range(len(before) + len(after))]
        assert before == expected[: len(before)]
        begin = expected.index(after[0])
        assert after == expected[begin : begin + len(after)]
        if protocol == "bsp":
            assert begin == len(before) == 6
        else:  # the last gradient of a rank may not count
            assert 0 < begin <= len(before)


def drawing(steps):
    """Return a loop without a loader that draws batches of its rank, and returns them."""

    def loop(run, model, optimizer):
        rank = run._part._rank
        data, drawn = numbered_data(), []
        for number in run.steps(steps):
            x, y = (each[(number * RANKS + rank) % 8 :][:BATCH] for each in data.tensors)
            drawn.append((x, y))
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        assert run.over
        return drawn

    return loop


@pytest.mark.parametrize("server", [True, False])
def test_a_loop_without_a_loader_has_the_parameters_of_the_mean_gradient(server):
    network = make_network()
    network.norm = nn.Identity()

    def parts():
        model = copy.deepcopy(network)
        return model, sgd(model), None

    ranks = AttachedThreads(RANKS, parts, "bsp", server=server)
    drawn = ranks.run(drawing(7))
    assert [len(each) for each in drawn] == [7] * RANKS
    model = copy.deepcopy(network)
    optimizer = sgd(model)
    for batches in zip(*drawn, strict=True):
        optimizer.zero_grad()
        for x, y in batches:
            (loss_of(model, x, y) / RANKS).backward()
        optimizer.step()
    for trained, _, _ in ranks.parts:
        for own, expected in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("protocol", ["k_sync(k=1)", "pull(k=1)", "asp", "k_async(k=2)"])
def test_a_gradient_that_is_dropped_is_a_dropped_batch(protocol):
    def loop(run, model, optimizer):
        steps = 0
        for _ in run.steps():
            with run.minibatch():
                optimizer.zero_grad()
                model(torch.rand(2, 1, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
                steps += 1
        return steps

    ranks = AttachedThreads(RANKS, make_stepping, protocol, stop="gradients=30")
    steps = ranks.run(loop)
    totals = ranks.server.result.history.totals
    assert totals.used == 30
    assert sum(steps) >= totals.used + totals.dropped - totals.notices


def test_the_start_line_says_that_batches_may_be_dropped(capfd):
    AttachedThreads(1, make_stepping, "bsp", stop="gradients=1").run(lambda run, *_: next(run.steps()))
    assert "so a dropped gradient is a dropped batch" in " ".join(capfd.readouterr().err.split())


def test_a_process_alone_makes_as_many_steps():
    model, optimizer, _ = make_stepping()
    run = pl.attach(model, optimizer, None, protocol="bsp")
    steps = 0
    for steps in run.steps(5):  # noqa: B007  # the last one
        model(torch.rand(2, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
    assert (steps, run.update, run.stopped_by) == (4, 5, "gradients")
    with pytest.raises(pl.UsageError, match=r"give it a count, as steps\(1000\)"):
        next(pl.attach(model, optimizer, None, protocol="bsp").steps())


def test_a_loop_that_mixes_both_ways_is_told_the_right_one():
    def with_loader(run, model, optimizer):
        next(iter(run.loader))

    def without_end(run, model, optimizer):
        next(run.steps())

    def without_steps(run, model, optimizer):
        model(torch.rand(2, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()

    def with_steps(run, model, optimizer):
        next(run.steps(3))

    def of_epochs(run, model, optimizer):
        for _ in run.epochs(2):
            next(iter(run.loader))

    wrong = {
        with_loader: (make_stepping, "iterate over run.steps(1000) in place of run.loader"),
        without_end: (make_stepping, "the run has no end"),
        without_steps: (make_stepping, "optimizer.step() without a batch of the run: iterate over run.steps(1000)"),
        with_steps: (streams(), "run.steps() is for a loop that draws its data without a loader"),
        of_epochs: (streams(), "these data have no length; give gradients= instead"),
    }
    for loop, (parts, expected) in wrong.items():
        stop = "gradients=9" if loop is with_loader else None
        [answer] = AttachedThreads(1, parts, "bsp", stop=stop).run(loop)
        assert isinstance(answer, pl.PacelineError)
        assert expected in str(answer)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (None, "are of each rank"),
        (DataLoader(Stream(0), batch_size=4), "are of each rank"),
        (DataLoader(range(SAMPLES), batch_sampler=[[0, 1], [2]]), "are those of a batch sampler"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(loader, reason):
    model, optimizer, _ = make_stepping()
    with pytest.raises(pl.UsageError, match=f"the batches {reason}: type bsp"):
        pl.attach(model, optimizer, loader, protocol="balanced(m=4)")
