"""DBW and blind DBW: the chosen quorum, observation by observation and in short runs."""

from functools import partial
from math import inf, isnan, nan

import numpy as np
import pytest
import torch

import paceline as pl
from driven_controller import Driven
from paceline.core.events import Arrival, Step
from paceline.core.records import DecisionMade, WorkerJoined, WorkerLost
from paceline.errors import PacelineWarning
from paceline.policies.controllers.update_times import fastest
from paceline.policies.learning_rate import LRScaling
from paceline.policies.noise_rule import NoiseRule, NoiseScaling
from selections import parametrize_few
from tiny_jobs import sgd, small_net, tiny_job

N = 5


def chosen(result):
    return [record.k for record in result.history.of(DecisionMade) if record.kind == "quorum"]


def test_the_first_two_updates_wait_for_all():
    driven = Driven(pl.controllers.DBW(), 4)
    assert driven.k == 4
    assert driven.update(loss=1.0) == 4
    assert driven.update(loss=0.9) < 4
    assert "expects the loss to fall" in driven.reason


def test_equal_times_and_gains_choose_the_largest_k():
    driven = Driven(pl.controllers.DBW(), 4)
    for loss in (1.0, 0.5, 0.2, 0.1, 0.05):  # falls faster than the gradient explains: L is clipped to 0
        driven.update(loss=loss, times=[1.0, 1.0 + 1e-13, 1.0 + 2e-13, 1.0 + 3e-13])
    assert driven.k == 4


@pytest.mark.parametrize("controller", [pl.controllers.DBW(), pl.controllers.BDBW()])
def test_times_of_zero_are_accepted(controller):
    driven = Driven(controller, 4)
    for loss in (1.0, 0.9, 0.8, 0.7):
        driven.update(loss=loss, times=[0.0] * 4)
    assert driven.k == 4


def test_a_quorum_with_time_zero_is_preferred():
    assert fastest([1.0, 1.1, 5.0], [0.0, 0.0, 1e-6]) == 2
    assert fastest([-1.0, 0.1, 0.3], [0.0, 1.0, 2.0]) == 3


@pytest.mark.parametrize(("no_gain", "expected"), [("all", 4), ("keep", 2)])
def test_a_gain_of_zero_has_its_own_rule(no_gain, expected):
    """The loss rises although the gradient is large: L eta > 2, and every G_k is negative."""
    driven = Driven(pl.controllers.DBW(D=1, no_gain=no_gain, beta=9), 4)
    for loss in (1.0, 0.93, 0.86):
        driven.update(loss=loss, times=[1.0, 1.0, 10.0, 20.0])
    assert driven.k == 2
    driven.update(loss=1.2, times=[1.0, 1.0])
    assert driven.k == expected
    assert "no k has a positive gain" in driven.reason


def test_a_rising_loss_increases_k_by_one():
    driven = Driven(pl.controllers.DBW(D=5), 4)
    for loss in (1.0, 0.93, 0.86):
        driven.update(loss=loss)
    assert driven.k == 1
    assert driven.update(loss=0.86 * 1.009) == 1
    assert driven.update(loss=0.86 * 1.009 * 1.011) == 2
    assert "more than k=1, because the loss rose" in driven.reason


def test_a_rising_negative_loss_increases_k_by_one():
    driven = Driven(pl.controllers.DBW(), 4)
    for loss in (-1.0, -1.07, -1.14):
        driven.update(loss=loss)
    assert driven.k == 1
    assert driven.update(loss=-1.1) == 2


def test_with_k_1_the_last_estimates_are_kept():
    driven = Driven(pl.controllers.DBW(D=2), 4)
    for loss in np.linspace(1.0, 0.3, 11):
        driven.update(loss=float(loss))
    assert driven.k == 1
    assert driven.state.gain.variance == pytest.approx(4 / 3 * (1.0 - 0.9))
    assert driven.state.gain.smoothness >= 0


def test_microbatches_give_the_variance_at_k_1():
    driven = Driven(pl.controllers.DBW(D=2), 4)
    for loss in np.linspace(1.0, 0.3, 11):
        driven.update(loss=float(loss), variance=0.25)
    assert driven.k == 1
    assert driven.state.gain.variance == 0.25


def test_an_update_with_unobserved_gradients_does_not_change_the_gain():
    driven = Driven(pl.controllers.DBW(), 4)
    driven.version, driven.update_size = 1, 4
    driven.ask(
        "open",
        step=Step(squared_norm=0.9, progress=0.09, squared_step=0.009, learning_rate=0.1, next_learning_rate=0.1),
    )
    assert driven.state.gain.gains([0.1]) is None


@pytest.mark.slow
def test_the_rate_of_the_next_update_may_depend_on_k():
    """With eta(k) = eta k / n, the gain of few gradients is smaller than their time is shorter."""
    result = pl.train(
        tiny_job(optimizer=sgd(0.05), lr_rule="proportional"),
        protocol="dbw",
        cluster=pl.Cluster(4, pl.timing.Uniform(0.9, 1.1)),
        stop="updates=30",
    )
    assert min(chosen(result)) >= 3
    result = pl.train(
        tiny_job(optimizer=sgd(0.05)),
        protocol="dbw",
        cluster=pl.Cluster(4, pl.timing.Exponential(1.0)),
        stop="updates=30",
    )
    assert min(chosen(result)) == 1


def test_the_rate_of_the_next_update_may_depend_on_the_noise():
    """The rule "noise" is "constant" as phi goes to 0, and "proportional" as it goes to infinity."""
    actions = {}
    for scaling in (
        LRScaling(),
        LRScaling("proportional"),
        *(NoiseScaling(rule=NoiseRule(K=4, learning_rate=0.1), phi=phi) for phi in (1e-9, 1e9)),
    ):
        driven = Driven(pl.controllers.DBW(), 4, learning_rate=scaling)
        for loss in (1.0, 0.93, 0.86):
            driven.update(loss, times=[1.0, 1.3, 1.6, 1.9])
        actions[scaling] = driven.actions
    constant, proportional, little, much = actions.values()
    assert little[0].k == constant[0].k < proportional[0].k == much[0].k


def test_a_schedule_scales_the_rate_of_the_expected_gain():
    scheduled, smaller, other = (Driven(pl.controllers.DBW(), 4) for _ in range(3))
    scheduled.schedule_scale = 0.25
    for loss in (1.0, 0.93, 0.86):
        scheduled.update(loss)
        smaller.update(loss, next_rate=0.025)
        other.update(loss)
    assert scheduled.actions == smaller.actions != other.actions


@pytest.mark.parametrize(("unobserved", "expected"), [("lower", 1), ("upper", 4)])
def test_an_untried_k_is_optimistic_or_never_chosen(unobserved, expected):
    driven = Driven(pl.controllers.BDBW(unobserved=unobserved), 4)
    for _ in range(5):
        driven.update(loss=1.0, times=[1.0, 5.0, 10.0, 20.0])
    assert driven.k == expected


# -- late gradients
@pytest.mark.parametrize("unsent_s", [nan, 30.0])
@pytest.mark.parametrize(("late", "expected"), [(True, (5 + 5 + 101 + 10 + 10 + 20 + 20) / 7), (False, 5)])
def test_a_late_gradient_is_a_sample_of_its_version_unless_excluded(late, expected, unsent_s):
    driven = Driven(pl.controllers.BDBW(late=late), 4)
    for _ in range(3):  # of 4, 4, and 1 gradient
        driven.update(loss=1.0, times=[1.0, 5.0, 10.0, 20.0])
    arrived_s = driven.opened_s + 100.0  # the last update took 1 s, and began with 4 free workers
    driven.now = arrived_s if isnan(unsent_s) else arrived_s - unsent_s  # at which its notice came
    driven.ask("arrival", arrival=Arrival(driven.now, 2, 1, unsent_s=unsent_s), staleness=1, accepted=False)
    driven.state.durations.estimate()
    assert driven.state.durations.fitted()[4, 2] == pytest.approx(expected)


# -- under interrupts
ALL_RESTART = [pl.k_sync(k=1), pl.k_batch_sync(k=1)]
SOME_GO_ON = [pl.backup(k=1), pl.pull(k=1), pl.ringmaster(r=3, stops=True)]


@pytest.mark.parametrize(
    ("protocol", "pooled", "cells"),
    [
        *((protocol, True, [(1, 1), (2, 2)]) for protocol in ALL_RESTART),
        *((protocol, False, [(1, 1), (2, 1), (2, 2)]) for protocol in ALL_RESTART),
        *((protocol, True, [(1, 1), (2, 1), (2, 2)]) for protocol in SOME_GO_ON),
    ],
)
@pytest.mark.parametrize("controller", [pl.controllers.DBW, pl.controllers.BDBW])
def test_times_are_pooled_where_every_update_restarts_all_workers(controller, protocol, pooled, cells):
    driven = Driven(controller(pooled=pooled), 2, protocol)
    for loss, times in ((1.0, [1.0, 16.0]), (0.93, [2.0, 18.0]), (0.86, [3.0]), (0.8, [6.0])):
        driven.update(loss, times)
    times = driven.state.durations if controller is pl.controllers.BDBW else driven.state.times.durations
    assert sorted(times.fitted()) == cells
    if pooled and protocol in ALL_RESTART:
        assert times.fitted() == {(1, 1): 3.0, (2, 2): 17.0}


# -- with workers that come and go, and others
CHURN = [
    pl.Fault(worker=1, draw=2, back_after_s=9.0),
    pl.Fault(worker=2, draw=2),
    pl.Fault(worker=3, draw=1, back_after_s=3.0),
]


@parametrize_few(
    "protocol", ["dbw", "dbw(window=6)", "dbw(forgetting=0.9, base=k_sync)", "b_dbw", "adasync(base=backup)"], keep=1
)
def test_k_is_at_most_the_live_workers_when_some_are_lost_and_rejoin(protocol):
    cluster = pl.Cluster(N, pl.timing.Exponential(1.0), faults=CHURN)
    result = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=60")
    live = N
    for record in result.history:
        live += isinstance(record, WorkerJoined) - isinstance(record, WorkerLost)
        if isinstance(record, DecisionMade) and record.kind == "quorum":
            assert 1 <= record.k <= live
    assert sum(isinstance(record, WorkerLost) for record in result.history) == 3, "each fault fired"
    assert result.history.totals.updates == 60


AWAY = [pl.Fault(worker=worker, draw=3, back_after_s=9.0) for worker in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["bsp@seconds=9 >> dbw", "bsp@seconds=9 >> b_dbw"])
def test_a_phase_may_begin_while_every_worker_is_lost(protocol):
    cluster = pl.Cluster(4, pl.timing.Exponential(1.0), faults=AWAY)
    result = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=30", worker_timeout_s=3.0)
    assert result.history.totals.updates == 30


@pytest.mark.parametrize("controller", [pl.controllers.DBW(), pl.controllers.BDBW()])
def test_an_update_may_open_while_every_worker_is_lost(controller):
    driven = Driven(controller, 4)
    for _ in range(3):
        driven.update(loss=1.0)
    driven.n = 0
    driven.ask("open")
    assert driven.k == 1


def test_gradients_from_before_the_phase_keep_their_ranks():
    driven = Driven(pl.controllers.BDBW(), 3)
    driven.held = 2
    driven.ask("open")
    driven.now = 5.0
    driven.ask("arrival", arrival=Arrival(5.0, 2, 1), accepted=True)
    assert driven.state.durations.fitted() == {(3, 3): 5.0}


def test_one_worker_is_plain_sgd_with_a_note():
    with pytest.warns(PacelineWarning, match="plain SGD"):
        result = pl.train(tiny_job(), protocol="dbw", cluster=pl.Cluster(1), stop="updates=5")
    assert chosen(result) == [1] * 5
    plain = pl.train(tiny_job(), protocol="bsp", cluster=pl.Cluster(1), stop="updates=5")
    for ours, theirs in zip(result.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- what is refused
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pl.dbw(D=0), r"D=0 is not a whole number in \[1, inf\)"),
        (lambda: pl.dbw(beta=0.99), r"beta=0.99 is not a number in \[1, inf\)"),
        (lambda: pl.dbw(beta=inf), "beta=inf is not a number"),
        (lambda: pl.dbw(no_gain="most"), "no_gain='most', expected 'all' or 'keep'"),
        (lambda: pl.dbw(unobserved="middle"), "unobserved='middle', expected 'lower', 'mid' or 'upper'"),
        (lambda: pl.dbw(window=0), "window=0 is not a whole number"),
        (lambda: pl.dbw(forgetting=1.5), "forgetting=1.5 is not a number"),
        (lambda: pl.dbw(late="maybe"), "late='maybe', expected true or false"),
        (lambda: pl.dbw(release_idle=1), "release_idle=1, expected true or false"),
        (lambda: pl.dbw(base="asp"), "base = 'asp' is no protocol with a quorum k"),
        (lambda: pl.dbw(base=3), "base=3, expected text"),
        (lambda: pl.dbw(no_gain=["all"]), r"no_gain=\['all'\], expected"),
        (lambda: pl.dbw(base="backups"), "did you mean 'backup'"),
        (lambda: pl.adasync(K_0=0), "K_0=0 is not a whole number"),
        (lambda: pl.controllers.IdleWorkers(after=0), "after=0 is not a whole number"),
        (lambda: pl.simulate("dbw", "4*exp(mean=1)", updates=5), "needs losses and gradients"),
        (lambda: pl.simulate("adasync", "4*exp(mean=1)", updates=5), r"for example pl.b_dbw\(\)"),
        (
            lambda: pl.train(tiny_job(), protocol="adasync(K_0=4)", cluster="4*exp(mean=1)", stop="updates=5"),
            "K_0=4 with 4 workers leaves no room to grow; give K_0 < 4",
        ),
        (
            lambda: pl.train(tiny_job(), protocol="adasync(K_0=5)", cluster="4*exp(mean=1)", stop="updates=5"),
            "K_0=5 with 4 workers leaves no room to grow; give K_0 < 4",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(pl.UsageError, match=message):
        make()


def test_blind_dbw_needs_only_times():
    assert pl.simulate("b_dbw", "8*exp(mean=1)", updates=200).totals.mean_k < 8


def summed(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="sum")


class Tempered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_net()


def with_temperature(samples):
    inputs, target = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "target": target, "names": [str(i) for i in range(len(samples))], "by": torch.tensor(2.0)}


def tempered(model, batch, reduction="mean"):
    assert len(batch["names"]) == len(batch["inputs"])
    output = model.net(batch["inputs"]) / batch["by"]
    return torch.nn.functional.cross_entropy(output, batch["target"], reduction=reduction)


def test_a_sum_loss_is_detected_on_batches_that_cannot_be_split():
    job = {"model": Tempered, "loss": None, "step": tempered, "collate": with_temperature}
    pl.train(tiny_job(**job), protocol="dbw", cluster="2*exp(mean=1)", stop="updates=2")
    job["step"] = partial(tempered, reduction="sum")
    with pytest.warns(PacelineWarning, match="sum of its samples' losses"):
        pl.train(tiny_job(**job), protocol="dbw", cluster="2*exp(mean=1)", stop="updates=2")


def test_a_sum_loss_causes_a_warning():
    with pytest.warns(PacelineWarning, match=r"sum of its samples' losses.*reduce the loss with .mean\(\)"):
        pl.train(tiny_job(loss=summed), protocol="dbw", cluster="2*exp(mean=1)", stop="updates=2")
    pl.train(tiny_job(loss=summed), protocol="bsp", cluster="2*exp(mean=1)", stop="updates=2")  # compares nothing
