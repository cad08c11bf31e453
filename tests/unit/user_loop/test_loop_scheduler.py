"""Learning-rate schedulers of attached loops: equal to DDP under BSP, and the same on ranks of unequal speed."""

import copy
import threading

import cloudpickle
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import paceline as pl
from attached_threads import AttachedThreads
from loop_parts import loss_of, make_network, make_parts, numbered_data, sgd, step
from paceline.user_loop.hooks.loop_scheduler import SchedulerBinding, check_scheduler
from selections import parametrize_few

EXACT = 1e-12
RANKS, EPOCHS, STEPS_AN_EPOCH = 3, 2, 4


def one_cycle(optimizer):
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * STEPS_AN_EPOCH)


def halved(optimizer):
    return StepLR(optimizer, 1, 0.5)


def in_sequence(optimizer):
    parts = [LambdaLR(optimizer, lambda at: (at + 1) / 3), StepLR(optimizer, 1, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[3])


def train(make_scheduler, per_epoch, ahead=0):
    """Return a loop that returns its steps and, at each of them, the workload and the rate.

    The first ranks make so many steps before the last one makes any.
    """

    def loop(run, model, optimizer):
        scheduler = make_scheduler(optimizer)
        run.set_scheduler(scheduler)
        number = ranks.append(run) or len(ranks) - 1
        steps, rates = [], []
        for _ in run.epochs(EPOCHS):
            for batch in run.loader:
                if number == RANKS - 1:
                    others_are_ahead.wait()
                rates.append((run.workload, run.lr))
                step(model, optimizer, [batch])
                steps.append([batch])
                made.append(number)
                if len(made) >= ahead:
                    others_are_ahead.set()
                if not per_epoch:
                    scheduler.step()
            if per_epoch:
                scheduler.step()
        return steps, rates, scheduler.last_epoch

    ranks, made, others_are_ahead = [], [], threading.Event()
    if not ahead:
        others_are_ahead.set()
    return loop


def as_ddp(network, steps, make_scheduler, per_epoch):
    model = copy.deepcopy(network)
    optimizer = sgd(model)
    scheduler = make_scheduler(optimizer)
    for number, of_ranks in enumerate(zip(*steps, strict=True), 1):
        optimizer.zero_grad()
        for [(x, y)] in of_ranks:
            (loss_of(model, x, y) / len(of_ranks)).backward()
        optimizer.step()
        if not per_epoch or number % STEPS_AN_EPOCH == 0:
            scheduler.step()
    return list(model.parameters())


@parametrize_few(("make_scheduler", "per_epoch"), [(one_cycle, False), (in_sequence, False), (halved, True)], keep=1)
def test_bsp_has_the_rates_of_ddp(make_scheduler, per_epoch):
    network = make_network()
    ranks = AttachedThreads(RANKS, make_parts(network, numbered_data()), "bsp")
    answers = ranks.run(train(make_scheduler, per_epoch))
    expected = as_ddp(network, [steps for steps, _, _ in answers], make_scheduler, per_epoch)
    for ours, theirs in zip(ranks.parts[0][0].parameters(), expected, strict=True):
        assert (ours - theirs).abs().max() < EXACT
    assert [last for _, _, last in answers] == [EPOCHS if per_epoch else EPOCHS * STEPS_AN_EPOCH] * RANKS


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["asp", "k_batch_async(k=2)"])
def test_ranks_of_unequal_speed_have_the_same_rate_at_the_same_workload(protocol):
    ranks = AttachedThreads(RANKS, make_parts(make_network(), numbered_data()), protocol)
    answers = ranks.run(train(one_cycle, per_epoch=False, ahead=20))
    counts = [len(steps) for steps, _, _ in answers]
    assert sum(counts) >= EPOCHS * STEPS_AN_EPOCH * RANKS
    assert min(counts) < max(counts)
    optimizer = sgd(make_network())
    scheduler = one_cycle(optimizer)
    expected = [optimizer.param_groups[0]["lr"]]
    for _ in range(EPOCHS * STEPS_AN_EPOCH):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    for _, rates, last in answers:
        assert all(lr == expected[workload // RANKS] for workload, lr in rates)
        assert last == EPOCHS * STEPS_AN_EPOCH


def test_a_scheduler_that_is_ahead_at_the_beginning_stays_ahead_and_one_that_is_behind_catches_up():
    position = 0
    for made, base in [(5, 0), (5, 5), (0, 5)]:
        optimizer = sgd(make_network())
        scheduler = StepLR(optimizer, 100)
        for _ in range(made):
            optimizer.step()
            scheduler.step()
        binding = SchedulerBinding(scheduler, lambda: position)  # noqa: B023  # called at once
        binding.begin(base)
        position = base + 2
        optimizer.step()
        scheduler.step()
        assert scheduler.last_epoch == max(made, base) + 2


def test_a_bound_scheduler_is_of_its_class_and_its_state_is_that_of_another():
    optimizer = sgd(make_network())
    scheduler = StepLR(optimizer, 2)
    expected = set(scheduler.state_dict())
    binding = SchedulerBinding(scheduler, lambda: 0)
    assert isinstance(scheduler, StepLR)
    assert type(scheduler).__name__ == "StepLR"
    assert set(scheduler.state_dict()) == expected
    with pytest.raises(pl.UsageError, match=r"call scheduler.step\(\) alone"):
        scheduler.step(3)
    binding.close()
    assert type(scheduler) is StepLR
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize("make_scheduler", [one_cycle, halved, in_sequence])
def test_a_copy_of_a_bound_scheduler_is_not_bound_and_has_its_class(make_scheduler):
    scheduler = make_scheduler(sgd(make_network()))
    kind = type(scheduler)
    binding = SchedulerBinding(scheduler, lambda: 0)
    by_value = cloudpickle.loads(cloudpickle.dumps(scheduler))  # pickle cannot pickle a lambda
    for copied in (by_value, copy.deepcopy(scheduler)):
        assert type(copied) is kind
        assert copied.last_epoch == scheduler.last_epoch
    binding.close()
    assert type(scheduler) is kind


def test_a_scheduler_that_follows_a_metric_is_refused():
    with pytest.raises(pl.UsageError, match="ReduceLROnPlateau follows a metric"):
        check_scheduler(ReduceLROnPlateau(torch.optim.SGD(make_network().parameters())))


def test_a_scheduler_that_attach_was_not_given_is_told(caplog):
    def loop(run, model, optimizer):
        scheduler = one_cycle(optimizer)
        for _ in run.epochs(1):
            for batch in run.loader:
                step(model, optimizer, [batch])
                scheduler.step()

    AttachedThreads(2, make_parts(make_network(), numbered_data()), "bsp").run(loop)
    assert "give scheduler= to attach" in caplog.text
