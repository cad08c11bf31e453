"""Attached loops that step several optimizers in turn: each step is an update of the parameters of one of them."""

import copy
from collections import Counter
from itertools import cycle, islice

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from attached_threads import AttachedThreads
from paceline.catalogue.parser import parse_plan
from paceline.coordinator.admission import AFTER_LAST_ITERATION, NO_BATCH, OTHER_STEP
from paceline.core.gradient import OLD_DRAW
from paceline.core.records import GradientArrived, UpdateMade
from paceline.user_loop.several_optimizers import SeveralOptimizers, as_module, as_one, check_several
from selections import parametrize_few

EXACT = 1e-12
SAMPLES, BATCH, RANKS = 48, 4, 3
CRITIC, GENERATOR = 2, 1  # numbers of the optimizers
PER_EPOCH = SAMPLES // BATCH


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(SAMPLES, 3, generator=generator).double(), torch.arange(SAMPLES))


def networks():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return as_module([generator, critic])


def make_optimizers(models):
    generator, critic = models
    return [
        torch.optim.Adam(generator.parameters(), lr=0.01),
        torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9),
    ]


def make_parts(loader=True, optimizers=make_optimizers, **options):
    def parts():
        models = networks()
        loading = {"batch_size": BATCH, "shuffle": True, **options}
        return models, as_one(optimizers(models)), DataLoader(data(), **loading) if loader else None

    return parts


def noise(x):
    return x.flip(1).cos()


def critic_step(models, optimizer, x):
    generator, critic = models
    optimizer.zero_grad()
    softplus(-critic(x)).mean().backward()
    softplus(critic(generator(noise(x)).detach())).mean().backward()
    optimizer.step()


def generator_step(models, optimizer, x):
    generator, critic = models
    optimizer.zero_grad()
    softplus(-critic(generator(noise(x)))).mean().backward()  # the gradients of the critic are not used
    optimizer.step()


def gan(epochs=2, critics=1, on_step=lambda run, rank: None):
    """Return a loop of a GAN with several steps of the critic for each of the generator; it returns its batches."""
    runs = []

    def loop(run, models, both):
        runs.append(run)
        opt_g, opt_d = both.optimizers
        batches = []
        for _ in run.epochs(epochs):
            for x, numbers in run.loader:
                batches.append((x, numbers))
                critic_step(models, opt_d, x)
                on_step(run, len(batches))
                if len(batches) % critics == 0:
                    generator_step(models, opt_g, x)
        return batches

    return loop


def plain(batches, critics=1):
    """Return the parameters of the plain loop."""
    models = networks()
    opt_g, opt_d = make_optimizers(models)
    for number, x in enumerate(batches, 1):
        critic_step(models, opt_d, x)
        if number % critics == 0:
            generator_step(models, opt_g, x)
    return list(models.parameters())


def run(protocol, loop, count=RANKS, *, parts=None, **settings):
    ranks = AttachedThreads(count, parts or make_parts(), protocol, **settings)
    return ranks, ranks.run_well(loop)


def distance(one, other):
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


def of_updates(ranks):
    """Return the optimizers of the gradients in each update."""
    updates, held = [], []
    for record in ranks.server.result.history:
        if isinstance(record, GradientArrived) and record.used:
            held.append(record.step_place[0])
        elif isinstance(record, UpdateMade):
            updates.append(held)
            held = []
    return updates


@parametrize_few(
    ("protocol", "server", "critics"),
    [
        ("bsp", False, 1),
        ("bsp", True, 1),
        ("balanced(m=4, leases=1)", False, 1),
        ("balanced(m=4, leases=1)", True, 2),
        ("bsp", False, 4),
    ],
    keep=3,
)
def test_the_parameters_are_those_of_the_plain_loop(protocol, server, critics, tmp_path):
    ranks, answers = run(protocol, gan(critics=critics), server=server, out=tmp_path / "run")
    batches = [torch.cat([x for x, _ in parts]) for parts in zip(*answers, strict=True)]
    assert len(batches) == 2 * PER_EPOCH // RANKS
    expected = plain(batches, critics)
    for models, _, _ in ranks.parts:
        assert distance(models.parameters(), expected) < EXACT
    seen = Counter(int(number) for answer in answers for _, numbers in answer for number in numbers)
    assert seen == dict.fromkeys(range(SAMPLES), 2)
    assert ranks.server.result.stopped_by == "epochs"
    assert pl.replay(tmp_path / "run").is_same


def test_the_state_of_each_optimizer_is_that_of_the_plain_loop():
    ranks, answers = run("bsp", gan(), server=False)
    batches = [torch.cat([x for x, _ in parts]) for parts in zip(*answers, strict=True)]
    models = networks()
    own = make_optimizers(models)
    for x in batches:
        critic_step(models, own[1], x)
        generator_step(models, own[0], x)
    for ours, theirs in zip(ranks.parts[0][1].optimizers, own, strict=True):
        ours, theirs = ours.state_dict(), theirs.state_dict()
        assert ours["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            for name, value in state.items():
                assert torch.allclose(torch.as_tensor(ours["state"][number][name]), torch.as_tensor(value), atol=EXACT)


@parametrize_few(("protocol", "server"), [("k_sync(k=2)", False), ("k_sync(k=1)", True), ("k_sync(k=2)", True)], keep=2)
def test_a_late_rank_finds_its_place_in_the_iteration(protocol, server, tmp_path):
    ranks, _ = run(protocol, gan(critics=3), server=server, out=tmp_path / "run")
    updates = of_updates(ranks)
    assert all(len(set(each)) == 1 for each in updates)
    order = [each[0] for each in updates]
    assert order == list(islice(cycle([CRITIC, CRITIC, CRITIC, GENERATOR]), len(order)))
    assert pl.replay(tmp_path / "run").is_same


def test_accepted_gradients_make_the_updates():
    """Each gradient is known by its loss at the parameters of its version."""
    ranks, answers = run("k_sync(k=2)", gan(), server=False)
    batches = [x for answer in answers for x, _ in answer]
    models = networks()
    optimizers = make_optimizers(models)
    held = []
    for record in ranks.server.result.history:
        if isinstance(record, GradientArrived) and record.used:
            part = record.step_place[0]
            held.append(next((part, x) for x in batches if abs(loss_of(models, part, x) - record.loss) < EXACT))
        elif isinstance(record, UpdateMade):
            replay(models, optimizers, held)
            held = []
    assert distance(models.parameters(), ranks.parts[0][0].parameters()) < EXACT


def losses(models, part, x):
    generator, critic = models
    if part == GENERATOR:
        return softplus(-critic(generator(noise(x)))).mean()
    return softplus(-critic(x)).mean() + softplus(critic(generator(noise(x)).detach())).mean()


def loss_of(models, part, x):
    with torch.no_grad():
        return float(losses(models, part, x))


def replay(models, optimizers, gradients):
    [optimizer] = {optimizers[part - 1] for part, _ in gradients}
    optimizer.zero_grad()
    for part, x in gradients:
        (losses(models, part, x) / len(gradients)).backward()
    optimizer.step()


def test_a_rank_that_comes_back_waits_for_the_step_of_the_others(tmp_path):
    killed = []

    def on_step(run, count):
        if count == 5 and not killed and run is ranks._runs[1]:
            killed.append(count)
            ranks.kill(1, is_restarted=True)

    ranks = AttachedThreads(RANKS, make_parts(), "bsp", server=False, out=tmp_path / "run", stop="epochs=4")
    attach, ranks._runs = ranks._attach, {}

    def attached(rank):
        ranks._runs[rank] = attach(rank)
        return ranks._runs[rank]

    ranks._attach = attached
    answers = ranks.run(gan(epochs=4, critics=3, on_step=on_step))
    assert killed == [5]
    assert not any(isinstance(each, Exception) for each in answers), answers
    order = [each[0] for each in of_updates(ranks)]
    assert order == list(islice(cycle([CRITIC, CRITIC, CRITIC, GENERATOR]), len(order)))
    assert all(distance(models.parameters(), ranks.parts[0][0].parameters()) == 0 for models, _, _ in ranks.parts)
    dropped = Counter(each.reason for each in ranks.server.result.history.of(GradientArrived) if not each.used)
    assert set(dropped) <= {OTHER_STEP, NO_BATCH, AFTER_LAST_ITERATION, OLD_DRAW}


def test_without_a_loader_an_iteration_is_a_step():
    def loop(run, models, both):
        opt_g, opt_d = both.optimizers
        numbers = []
        for number in run.steps(5):
            x = torch.full((2, 3), number / 5).double()
            critic_step(models, opt_d, x)
            generator_step(models, opt_g, x)
            numbers.append(number)
        return numbers

    ranks, answers = run("bsp", loop, parts=make_parts(loader=False), server=False)
    assert answers == [list(range(5))] * RANKS
    assert (
        distance(ranks.parts[0][0].parameters(), plain([torch.full((2, 3), n / 5).double() for n in range(5)])) < EXACT
    )
    assert ranks.server.result.stopped_by == "gradients"


def test_each_gradient_is_an_update_under_asp():
    ranks, _ = run("asp", gan())
    assert {len(each) for each in of_updates(ranks)} == {1}
    assert {each[0] for each in of_updates(ranks)} == {CRITIC, GENERATOR}


def test_a_step_that_overflows_is_left_out():
    def loop(run, models, both):
        opt_g, opt_d = both.optimizers
        scaler = GradScaler("cpu", init_scale=4.0)
        generator, critic = models
        for _ in run.epochs(1):
            for number, (x, _) in enumerate(run.loader):
                critic_step(models, opt_d, x)
                opt_g.zero_grad()
                scaler.scale(softplus(-critic(generator(noise(x)))).mean()).backward()
                if number == 1:
                    generator[0].weight.grad.mul_(float("inf"))
                scaler.step(opt_g)
                scaler.update()
        return scaler.get_scale()

    ranks, answers = run("balanced(m=4, leases=1)", loop, server=False)
    assert answers == [2.0] * RANKS
    order = [each[0] if each else 0 for each in of_updates(ranks)]
    assert order == [CRITIC, GENERATOR, CRITIC, 0] + [CRITIC, GENERATOR] * 2


def test_each_scheduler_follows_the_iterations():
    def loop(run, models, both):
        schedulers = [StepLR(each, 2, 0.5) for each in both.optimizers]
        for each in schedulers:
            run.set_scheduler(each)
        opt_g, opt_d = both.optimizers
        for _ in run.epochs(1):
            for x, _ in run.loader:
                critic_step(models, opt_d, x)
                generator_step(models, opt_g, x)
                for each in schedulers:
                    each.step()
        return [each.param_groups[0]["lr"] for each in both.optimizers]

    _, answers = run("bsp", loop, server=False)
    assert answers == [[0.01 / 4, 0.05 / 4]] * RANKS


@pytest.mark.parametrize("server", [False, True])
def test_a_stop_within_an_iteration_leaves_out_the_steps_after_it(server):
    ranks, _ = run("bsp", gan(), server=server, stop="updates=3")
    assert [each[0] for each in of_updates(ranks)] == [CRITIC, GENERATOR, CRITIC]
    assert distance(ranks.parts[0][0].parameters(), ranks.parts[1][0].parameters()) == 0


@pytest.mark.processes
@pytest.mark.parametrize("processes", [0, 2])
def test_a_batch_that_was_loaded_ahead_is_not_loaded_again(processes):
    _ranks, answers = run(
        "bsp", gan(epochs=1), count=1, parts=make_parts(num_workers=processes, shuffle=False), server=False
    )
    numbers = [int(number) for _, numbers in answers[0] for number in numbers]
    assert numbers == list(range(SAMPLES))


def test_a_process_alone_trains_as_it_is(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    models = networks()
    generator, critic = models
    optimizers = make_optimizers(models)
    run = pl.attach([generator, critic], optimizers, DataLoader(data(), BATCH), protocol="bsp")
    batches = []
    for _ in run.epochs(1):
        for x, _ in run.loader:
            batches.append(x)
            critic_step(models, optimizers[1], x)
            generator_step(models, optimizers[0], x)
    assert distance(models.parameters(), plain(batches)) == 0
    assert run.update == 2 * PER_EPOCH


@pytest.mark.parametrize(
    ("protocol", "stop", "accumulate", "words"),
    [
        ("all_reduce", None, 1, "ranks step alone"),
        ("bsp + local_steps(H=2)", None, 1, "ranks step alone"),
        ("k_async(k=2)", None, 1, "gradients of several versions"),
        ("dbw", None, 1, "needs one loss"),
        ("auto", None, 1, "gradients of several versions|needs one loss"),
        ("bsp", pl.Stop(loss=0.1), 1, "loss=0.1 needs one loss"),
        ("bsp", None, 2, "accumulate=2"),
    ],
)
def test_what_cannot_work_is_refused(protocol, stop, accumulate, words):
    with pytest.raises(pl.UsageError, match=words):
        check_several(parse_plan(protocol), stop, accumulate)


def test_a_parameter_in_two_optimizers_is_refused():
    models = networks()
    with pytest.raises(pl.UsageError, match="optimizers 0 and 1 both hold"):
        as_one([torch.optim.SGD(models.parameters(), lr=0.1), torch.optim.SGD(models[1].parameters(), lr=0.1)])
    with pytest.raises(pl.UsageError, match="no optimizer"):
        as_one([])


def test_a_saved_state_is_restored():
    models = networks()
    both = as_one(make_optimizers(models))
    for x, _ in DataLoader(data(), BATCH):
        critic_step(models, both.optimizers[1], x)
        generator_step(models, both.optimizers[0], x)
    assert isinstance(both, SeveralOptimizers)
    saved = copy.deepcopy(both.state_dict())
    assert len(saved["param_groups"]) == 2
    assert sorted(saved["state"]) == list(range(8))
    other = as_one(make_optimizers(networks()))
    other.load_state_dict(saved)
    for ours, theirs in zip(other.optimizers, both.optimizers, strict=True):
        assert str(ours.state_dict()) == str(theirs.state_dict())
    assert set(both.state) == set(models.parameters())
    both.state.clear()
    assert not both.state
    assert both.state.get(models[0][0].weight) is None
