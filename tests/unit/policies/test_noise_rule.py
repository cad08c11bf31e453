from functools import partial
from itertools import pairwise
from random import Random
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from arrivals import arrival
from coordinator_harness import coordinator
from paceline.core.events import Apply, Compute, Decision, Step, UpdateApplied
from paceline.core.gradient import NOT_MEASURED
from paceline.core.records import UpdateMade
from paceline.errors import PacelineWarning
from paceline.policies.learning_rate import LRScaling
from paceline.policies.noise_rule import LossGuard, NoiseRule, NoiseScaling, NoiseTracker
from paceline.protocols.protocol import as_plan
from paceline.run.noise_reference import reference_of
from paceline.server.optimizer import stepping
from selections import parametrize_few
from tiny_jobs import sgd, small_net, tiny_job

counts = st.integers(1, 64)
phis = st.floats(1e-3, 1e3)


@given(counts, counts, phis)
def test_the_reference_keeps_its_rate_and_smaller_updates_get_less(K, k, phi):
    rule = NoiseRule(K=K, learning_rate=0.1)
    assert rule.scale(K, phi) == pytest.approx(1.0)
    assert (rule.scale(k, phi) <= 1.0 + 1e-9) == (k <= K) or k == K


@given(counts, counts)
def test_the_limits_are_constant_and_proportional(K, k):
    rule = NoiseRule(K=K, learning_rate=0.1)
    assert rule.scale(k, 1e-9) == pytest.approx(LRScaling("constant").scale(k, K))
    assert rule.scale(k, 1e12) == pytest.approx(LRScaling("proportional").scale(k, K))


@given(counts, phis, st.floats(1, 100))
def test_staleness_lowers_the_rate_and_leaves_at_most_twice_the_stable_share(k, phi, price):
    rule = NoiseRule(K=16, learning_rate=0.1, momentum=0.9)
    fresh, stale = rule.scale(k, phi), rule.scale(k, phi, price)
    assert fresh / price - 1e-12 <= stale <= fresh + 1e-12
    assert stale <= 2 * max(1.0, fresh) / price + 1e-12
    if phi <= 16:
        assert stale == pytest.approx(k / 16 * (16 + phi) / (k * price + phi))


def test_the_progress_of_a_gradient_is_that_of_its_share_of_the_rate():
    rule = NoiseRule(K=8, learning_rate=0.1, momentum=0.9)
    for k, phi, price in [(8, 3.0, 1.0), (1, 3.0, 1.0), (1, 3.0, 20.0), (1, 300.0, 20.0)]:
        assert rule.progress(k, phi, price) * k * (8 + phi) / 8 == pytest.approx(rule.scale(k, phi, price))


def test_an_adaptive_optimizer_divides_by_the_noise_of_the_gradient_too():
    rule = NoiseRule(K=8, learning_rate=0.1, momentum=0.9, adaptive=True)
    assert rule.progress(1, 1.0) == rule.progress(1, 1.0, noise_scale=1.0) == 0.5
    assert rule.progress(1, 1.0, noise_scale=7.0) == 0.25
    assert rule.progress(1, 1.0) > 4 * rule.progress(8, 1.0)
    assert rule.progress(1, 1.0, noise_scale=50.0) < 4 * rule.progress(8, 1.0, noise_scale=50.0)


def test_an_adaptive_optimizer_gets_the_square_root():
    plain, adaptive = (
        NoiseRule(K=16, learning_rate=0.1),
        NoiseRule(K=16, learning_rate=0.1, momentum=0.9, adaptive=True),
    )
    assert adaptive.scale(4, 10.0, 3.0) == pytest.approx(plain.scale(4, 10.0, 3.0) ** 0.5)
    assert NoiseScaling(rule=adaptive, phi=10.0).momentum_power(4) == 1.0


def test_the_velocity_keeps_its_half_life_in_gradients_where_noise_limits_the_rate_and_else_in_updates():
    rule = NoiseRule(K=16, learning_rate=0.1, momentum=0.9)
    assert NoiseScaling(rule=rule, phi=1e9).momentum_power(4) == pytest.approx(4 / 16)
    assert NoiseScaling(rule=rule, phi=1e-9).momentum_power(4) == pytest.approx(1.0)
    assert NoiseScaling(rule=rule, phi=3.0, guard=0.5).momentum_power(4) == rule.scale(4, 3.0)
    assert NoiseScaling(rule=NoiseRule(K=16, learning_rate=0.1), phi=3.0).momentum_power(4) == 1.0


def velocity_after(powers, nesterov=False, zeros_first=1):
    """Return how far SGD moves in each step with these powers of the momentum, for gradients of 1 after some of 0."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, nesterov=nesterov)
    moved = [0.0]
    for step, power in enumerate([1.0] * zeros_first + powers):
        weight.grad = torch.full_like(weight, step >= zeros_first)
        with stepping(optimizer, 1.0, momentum_power=power):
            optimizer.step()
        moved.append(-weight.item())
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["dampening"] == 0.0
    return [after - before for before, after in pairwise(moved)][zeros_first:]


def test_a_velocity_keeps_its_size_when_its_momentum_changes():
    """Else a large update after small ones begins with a velocity that is up to K times as large."""
    moved = velocity_after([1 / 4] * 500 + [1.0] * 50)
    assert moved[499] == pytest.approx(0.1 / (1 - 0.9), rel=1e-4)
    assert moved[500:] == pytest.approx(moved[499:-1], rel=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("power", [1 / 4, 1.0])
def test_a_gradient_moves_the_parameters_as_far_with_any_power_of_the_momentum(power, nesterov):
    assert velocity_after([power] * 500, nesterov)[-1] == pytest.approx(0.1 / (1 - 0.9), rel=1e-4)


def drive(plan, n=4, updates=300, **rule):
    """Return the updates of a coordinator at losses 1 + 4 / i, and its decisions on the learning rate."""
    random = Random(0)
    noise = NoiseRule(K=n, **{"learning_rate": 0.1, **rule})
    ours = coordinator(plan, n, learning_rate=LRScaling("noise"), noise=noise)
    commands, tasks, applied, decided, arrivals = ours.begin(), [], [], [], 0
    while len(applied) < updates:
        tasks += [command for command in commands if isinstance(command, Compute)]
        applied += [command for command in commands if isinstance(command, Apply)]
        decided += [each for each in commands if isinstance(each, Decision) and each.kind == "learning_rate"]
        if ours.awaits_step:
            commands = ours.handle(
                UpdateApplied(
                    float(arrivals),
                    ours.version,
                    Step(squared_norm=0.9, progress=0.09, squared_step=0.01, learning_rate=0.1, next_learning_rate=0.1),
                )
            )
            continue
        task = tasks.pop(random.randrange(len(tasks)))
        arrivals += 1
        numbers = {"loss": 1 + 4 / arrivals, "squared_norm": 1.0, "variance": 0.5}
        commands = ours.handle(arrival(float(arrivals), task.worker, task.draw, **numbers))
    return applied, decided


def test_the_coordinator_scales_updates_by_the_rule():
    applied, decided = drive(pl.pull(k=2))
    last = decided[-1].numbers
    assert applied[-1].lr_scale == pytest.approx(NoiseRule(K=4, learning_rate=0.1).scale(2, last["phi"]), rel=0.1)
    assert last["V"] == pytest.approx(0.5)
    assert "of the given rate for k=2: variance 0.5" in decided[-1].reason


def test_stale_updates_pay_the_price_of_staleness():
    applied, decided = drive(pl.asp())
    last = decided[-1].numbers
    assert last["d"] > 2
    assert applied[-1].lr_scale == pytest.approx(
        NoiseRule(K=4, learning_rate=0.1).scale(1, last["phi"], last["d"]), rel=0.15
    )
    assert "price of staleness" in decided[-1].reason


def test_momentum_makes_staleness_dearer_by_what_it_adds_to_fresh_gradients():
    applied, decided = zip(*(drive(pl.asp(), momentum=momentum) for momentum in (0.0, 0.8)), strict=True)
    plain, heavy = (decisions[-1].numbers["d"] for decisions in decided)
    assert heavy > 1.8 / 0.2 * plain
    assert applied[1][-1].lr_scale <= 2 / heavy * 1.1


def test_some_steps_are_measured_and_the_first_ones_all():
    applied, _ = drive(pl.pull(k=2), updates=60)
    measured = [update.measure for update in applied]
    assert all(measured[:16])
    assert sum(measured[20:]) == 10


def test_momentum_reaches_the_update():
    applied, _ = drive(pl.pull(k=2), momentum=0.9)
    assert 0.5 < applied[-1].momentum_power < 1
    assert applied[-1].momentum_power == applied[-1].lr_scale


def test_a_tracker_goes_on_from_its_state():
    measured = NOT_MEASURED._replace(loss=2.0, squared_norm=1.0, variance=0.3)
    first, second = NoiseTracker(NoiseRule(K=4, learning_rate=0.1)), NoiseTracker(NoiseRule(K=4, learning_rate=0.1))
    for _ in range(40):
        first.accept(measured)
        first.make((0,), 1.0)
    second.load_state_dict(first.state_dict())
    assert second.scaling == first.scaling
    assert isinstance(first.scaling, NoiseScaling)


def test_a_step_that_only_this_rank_knows_changes_nothing():
    measured = NOT_MEASURED._replace(loss=2.0, squared_norm=1.0)
    alone, common = (
        NoiseTracker(NoiseRule(K=4, learning_rate=0.1), has_steps=has_steps) for has_steps in (False, True)
    )
    for tracker in (alone, common):
        for _ in range(2):
            tracker.accept(measured)
        tracker.make((0, 0), 1.0)
        assert tracker.needs_step() == (tracker is common)
        tracker.finish(
            Step(squared_norm=0.75, progress=0.1, squared_step=0.1, learning_rate=0.1, next_learning_rate=0.1)
        )
        tracker.accept(measured)
        tracker.make((0,), 1.0)
    assert (alone.estimate.variance, common.estimate.variance) == (1.0, 0.5)


def test_numbers_that_are_unknown_are_left_out():
    tracker = NoiseTracker(NoiseRule(K=4, learning_rate=0.1))
    tracker.accept(NOT_MEASURED._replace(loss=2.0))
    tracker.make((0,), 1.0)
    assert "V" not in tracker.change()


def test_a_protocol_that_needs_more_than_the_live_workers_has_a_price():
    cluster = pl.Cluster(4, faults=[pl.Fault(worker=0, draw=3), pl.Fault(worker=1, draw=3)])
    plan = "asp@gradients=40 >> k_async(k=3)"
    run = pl.train(tiny_job(lr_rule="noise"), protocol=plan, cluster=cluster, stop="gradients=90")
    assert run.history.totals.used == 90


def test_a_reference_without_the_rule_is_refused():
    with pytest.raises(pl.UsageError, match="lr_of=2 has no effect with lr_rule='constant'"):
        pl.train(tiny_job(lr_of=2), protocol="asp", cluster="4*exp(mean=1)", stop="updates=5")


def test_the_guard_lowers_the_rate_when_the_loss_rises_and_recovers():
    guard = LossGuard()
    assert not any(guard.accept(1.0) for _ in range(100))
    risen = [guard.accept(2.0) for _ in range(100)]
    assert risen.count(True) == 1
    assert guard.factor == pytest.approx(0.7)
    assert not any(guard.accept(2.0) for _ in range(200))
    assert guard.factor == 1.0


def test_the_guard_lowers_the_rate_again_only_if_the_loss_goes_on_rising():
    guard, loss = LossGuard(), 1.0
    for _ in range(600):
        loss *= 1.01
        guard.accept(loss)
    assert guard.factor < 0.2


def test_the_guard_is_quiet_on_noise():
    random, guard = Random(0), LossGuard()
    assert not any(guard.accept(random.gauss(1.0, 1.0)) for _ in range(5000))


def test_the_reference_is_that_of_the_optimizer():
    sgd = tiny_job(lr_rule="noise")
    assert reference_of(sgd, small_net(), as_plan(pl.bsp()), 4) == NoiseRule(K=4, learning_rate=0.1, momentum=0.9)
    adam = tiny_job(lr_rule="noise", lr_of=2, optimizer=partial(torch.optim.AdamW, lr=0.01))
    assert reference_of(adam, small_net(), as_plan(pl.asp()), 4) == NoiseRule(
        K=2, learning_rate=0.01, momentum=0.9, adaptive=True
    )


@pytest.mark.parametrize(
    ("changes", "plan", "match"),
    [
        ({"optimizer": torch.optim.RMSprop}, pl.bsp(), "does not know how the steps of RMSprop grow"),
        ({"lr_of": 0}, pl.bsp(), r"lr_of=0 is not"),
        (
            {"optimizer": torch.optim.Adam},
            pl.asp() + pl.staleness_weight(),
            "staleness_weight only scales gradients, by which Adam divides again",
        ),
    ],
)
def test_what_the_rule_cannot_follow_is_refused(changes, plan, match):
    with pytest.raises(pl.UsageError, match=match):
        reference_of(tiny_job(lr_rule="noise", **changes), small_net(), as_plan(plan), 4)


def test_a_rate_of_more_gradients_than_workers_is_warned_of():
    with pytest.warns(PacelineWarning, match="lr_of=8, but there are 4 workers"):
        reference_of(tiny_job(lr_rule="noise", lr_of=8), small_net(), as_plan(pl.bsp()), 4)


def test_a_rate_per_worker_is_refused():
    with pytest.raises(pl.UsageError, match="the rule takes the rate of a whole update"):
        LRScaling("noise", "per_worker")


@pytest.mark.slow
@parametrize_few(
    ("optimizer", "over_bsp", "over_constant"),
    [(sgd(lr=0.1, momentum=0.9), 1.3, 0.7), (partial(torch.optim.Adam, lr=0.1), 2.0, 0.9)],
    keep=1,
)
def test_asynchronous_training_at_the_rate_of_bsp(optimizer, over_bsp, over_constant):
    def loss(protocol, lr_rule):
        job = tiny_job(lr_rule=lr_rule, optimizer=optimizer)
        run = pl.train(job, protocol=protocol, cluster="8*exp(mean=1)", stop="gradients=480", seed=1)
        updates = list(run.history.of(UpdateMade))
        return fmean(update.loss for update in updates[-len(updates) // 20 :])

    by_rule = loss("asp", "noise")
    assert by_rule < over_bsp * loss("bsp", "constant")
    assert by_rule < over_constant * loss("asp", "constant")


@pytest.mark.parametrize("leases", [[8, 8, 8, 8], [6, 2, 8, 9, 1, 4, 2], [1] * 32])
def test_variance_and_phi_do_not_depend_on_the_leases_of_an_update(leases):
    """Gradients of s of 8 samples have the mean 1 and the variance 8 V / s; an update has four minibatches."""
    rng, V, tracker = np.random.default_rng(1), 0.5, NoiseTracker(NoiseRule(K=4, learning_rate=0.1))
    alone = NoiseTracker(NoiseRule(K=4, learning_rate=0.1), has_steps=False)
    for update in range(1, 1001):
        gradients = 1 + rng.standard_normal(len(leases)) * np.sqrt(8 * V / np.array(leases))
        mean = np.average(gradients, weights=leases)
        for gradient, samples in zip(gradients, leases, strict=True):
            measured = NOT_MEASURED._replace(loss=1 + 10 / update, squared_norm=gradient**2, samples=samples)
            tracker.accept(measured, samples / 8)
            alone.accept(measured._replace(variance=8 * V / samples), samples / 8)
        for each in (tracker, alone):
            each.make((0,) * len(leases), 1.0, minibatches=4)
            each.finish(
                Step(squared_norm=mean**2, progress=0.0, squared_step=0.0, learning_rate=0.1, next_learning_rate=0.1)
            )
    assert tracker.estimate.variance == pytest.approx(V, rel=0.15)
    assert alone.estimate.variance == pytest.approx(V)
    assert alone.estimate.to_go == pytest.approx(10 / 1000, rel=0.05)
    assert alone.scaling.scale(4, 4) == 1.0
