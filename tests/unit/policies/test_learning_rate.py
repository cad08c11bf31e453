"""Learning rate and weight decay by workload, against closed forms; the plateau; invalid schedules."""

import json
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paceline as pl
from arrivals import arrival
from paceline.checkpoint.fingerprint import described
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core.events import Apply, Compute, Decision
from paceline.core.records import DecisionMade
from paceline.errors import UsageError
from paceline.jobs import load_job
from paceline.policies.learning_rate import Scales, ScheduleCurve, ScheduleTracker, is_plateau
from paceline.protocols.protocol import as_plan
from tiny_jobs import tiny_job

PAPER = pl.plans.LinearSchedule(warm_up="50%", warm_up_until="epochs=15", total="epochs=90")


def watch(until, *, warm_up=1000, total=10_000, check_every=0, window=1, least_reduction=0.0):
    return ScheduleTracker(
        ScheduleCurve(
            warm_up=warm_up,
            until=until,
            total=total,
            weight_decay=2.3,
            check_every=check_every,
            window=window,
            least_reduction=least_reduction,
        )
    )


def test_the_schedule_of_the_paper_reaches_a_third_of_the_rate_at_15_epochs_and_zero_at_90():
    curve = PAPER.in_gradients(None, per_epoch=40)
    at_epoch = {epoch: curve.scale(40 * epoch, curve.until) for epoch in (0, 7.5, 15, 52.5, 90, 91)}
    assert at_epoch == pytest.approx({0: 0, 7.5: 1 / 6, 15: 1 / 3, 52.5: 1 / 6, 90: 0, 91: 0})


@pytest.mark.parametrize("warm_up", ["50%", "epochs=45", pl.plans.Duration("gradients", 1800)])
def test_a_full_warm_up_gives_a_triangular_schedule(warm_up):
    curve = pl.plans.LinearSchedule(warm_up=warm_up, warm_up_until=None).in_gradients(3600, per_epoch=40)
    assert [curve.scale(w, curve.until) for w in (0, 900, 1800, 2700, 3600)] == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_a_warm_up_of_the_whole_run_never_decays():
    curve = pl.plans.LinearSchedule(warm_up="gradients=100", warm_up_until=None).in_gradients(100, per_epoch=None)
    assert [curve.scale(w, curve.until) for w in (0, 99, 100)] == [0, 0.99, 0]


quorums = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(rising=quorums, falling=quorums, warm_up=st.integers(1, 5000))
def test_the_total_scale_of_a_workload_does_not_depend_on_the_quorums(rising, falling, warm_up):
    until, total = sum(rising), sum(rising) + sum(falling)
    ours = ScheduleTracker(
        ScheduleCurve(
            warm_up=max(until, warm_up),
            until=until,
            total=total,
            weight_decay=None,
            check_every=0,
            window=1,
            least_reduction=0.0,
        )
    )
    ks = rising + falling
    begins = [0, *accumulate(ks)][:-1]
    moved = sum(k * ours.scales(w, k).lr for w, k in zip(begins, ks, strict=True))
    assert moved == pytest.approx(until / max(until, warm_up) * total / 2)  # the area of the triangle


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500), st.integers(0, 2000))
def test_the_scale_is_continuous_and_between_zero_and_one(until, more, left, workload):
    curve = ScheduleCurve(
        warm_up=until + more,
        until=until,
        total=until + more + left,
        weight_decay=None,
        check_every=0,
        window=1,
        least_reduction=0.0,
    )
    here, there = (curve.scale(w, until) for w in (workload, workload + 0.001))
    assert 0 <= here <= 1
    assert abs(here - there) <= 0.001 * max(1 / curve.warm_up, until / curve.warm_up / (more + left)) * (1 + 1e-6)


def test_the_weight_decay_follows_the_rate_times_k_or_is_unchanged():
    curve = ScheduleCurve(
        warm_up=100, until=100, total=200, weight_decay=2.3, check_every=0, window=1, least_reduction=0.0
    )
    assert ScheduleTracker(curve).scales(40, 20) == (0.5, 1.15)
    assert ScheduleTracker(
        ScheduleCurve(
            warm_up=100, until=100, total=200, weight_decay=None, check_every=0, window=1, least_reduction=0.0
        )
    ).scales(40, 20) == (0.5, 1.0)


def end_of_warm_up(losses, per_epoch=4, checks=5, until=1000, least_reduction=0.0):
    """Feed the mean losses of epochs, and return the epochs after which the warm-up ends; None if it does not."""
    ours = watch(until, check_every=checks * per_epoch, window=per_epoch, least_reduction=least_reduction)
    for epoch, loss in enumerate(losses, 1):
        for noise in [0.5, -0.5] * (per_epoch // 2):
            if ours.accept(loss + noise):
                return epoch
    return None


FALLING = [3 / epoch for epoch in range(1, 31)]


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        (FALLING, None),
        ([2.0] * 30, 10),
        ([9.0] * 4 + [2.0] * 26, 10),  # what was before the first look is not known
        (FALLING[:15] + [FALLING[14]] * 15, 20),
        ([*FALLING[:13], 9.0, *FALLING[14:]], None),  # a bump between two looks is not seen
        ([*FALLING[:14], 9.0, *FALLING[15:]], 15),  # at a look it is
        ([-epoch for epoch in range(30)], None),  # a loss below 0
        ([-2.0] * 30, 10),
    ],
)
def test_the_warm_up_ends_at_the_first_check_without_a_reduction(losses, ends):
    assert end_of_warm_up(losses) == ends


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40), st.integers(1, 6), st.floats(0, 0.5))
def test_a_plateau_is_decided_by_the_losses_at_two_checks(losses, checks, least_reduction):
    looks = losses[checks - 1 :: checks]
    flat = [i for i, (one, other) in enumerate(pairwise(looks), 2) if is_plateau(one, other, least_reduction)]
    ours = watch(1000, check_every=checks, least_reduction=least_reduction)
    ends = [i for i, loss in enumerate(losses, 1) if ours.accept(loss)]
    assert ends == [checks * flat[0]] * bool(flat) if flat else ends == []


@pytest.mark.parametrize(("now", "expected"), [(-2.05, False), (-2.01, True), (-1.99, True)])
def test_a_negative_loss_must_fall_by_a_fraction_of_its_magnitude(now, expected):
    assert is_plateau(-2.0, now, least_reduction=0.01) == expected


@pytest.mark.parametrize(
    ("check_every", "per_epoch", "looks"),
    [("epochs=5", 100, (500, 100)), ("epochs=0.5", 100, (50, 50)), ("gradients=70", None, (70, 70))],
)
def test_a_check_uses_the_mean_loss_of_the_last_epoch(check_every, per_epoch, looks):
    curve = pl.plans.LinearSchedule(check_every=check_every).in_gradients(9000, per_epoch)
    assert (curve.check_every, curve.window) == looks


def test_a_reduction_that_is_too_small_is_a_plateau():
    slowly = [2 * 0.99**epoch for epoch in range(30)]
    assert end_of_warm_up(slowly) is None
    assert end_of_warm_up(slowly, least_reduction=0.06) == 10
    assert end_of_warm_up(slowly, least_reduction=0.04) is None


def test_a_warm_up_without_plateau_ends_at_its_limit_with_one_note():
    ours = watch(1000, check_every=100, window=10)
    said = {w: text for w in range(1, 2001) if (text := ours.accept(1 / w))}
    assert said == {1000: "ends after 1000 gradients at 1 of the full rate: end of the warm-up"}


def test_the_decay_begins_at_the_plateau():
    ours = watch(1000, total=2000, check_every=100, window=100)
    assert [text for _ in range(300) if (text := ours.accept(2.0))] == [
        "ends after 200 gradients at 0.2 of the full rate: plateau, a mean loss of 2 after 2 100 gradients before"
    ]
    assert [ours.scales(w, 2).lr for w in (99, 199, 1099, 1999)] == pytest.approx([0.1, 0.2, 0.1, 0])


@given(st.lists(st.floats(0, 9), max_size=60), st.integers(0, 60))
def test_a_schedule_tracker_continues_from_its_state(losses, cut):
    whole, first, second = (watch(40, warm_up=50, total=60, check_every=7, window=3) for _ in range(3))
    said = [whole.accept(loss) for loss in losses]
    ours = [first.accept(loss) for loss in losses[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert ours + [second.accept(loss) for loss in losses[cut:]] == said
    assert second.state_dict() == whole.state_dict()


def test_update_scales_equal_the_requested_scales():
    schedule = pl.plans.LinearSchedule(warm_up_until="plateau", check_every="gradients=8").in_gradients(40, None)
    rate = pl.Job.learning_rate.fget(tiny_job(lr_rule="proportional", lr_is="per_worker"))
    ours = Coordinator(
        as_plan(pl.bsp()),
        workers=2,
        stop=pl.Stop(gradients=40),
        settings=CoordinatorSettings(per_epoch=None, learning_rate=rate, schedule=schedule),
    )
    work, told, asked, decided = list(ours.begin()), [], [], []
    while not ours.stopped:
        due = [command for command in work if isinstance(command, Compute)]
        expected = ours.expected_update()
        asked.append((expected.lr_scale, expected.weight_decay_scale))
        for each in due:
            work = ours.handle(arrival(float(ours.version + 1), each.worker, each.draw, loss=1.0))
            told += [(c.lr_scale, c.weight_decay_scale) for c in work if isinstance(c, Apply)]
            decided += [(ours.workload, c.reason) for c in work if isinstance(c, Decision) and c.kind == "warm_up"]
    assert told == asked
    assert len(told) == 20
    rising = [Scales(2 * (w + 1) / 20, 2.3 * (w + 1) / 20) for w in range(0, 16, 2)]
    falling = [Scales(2 * 0.8 * (39 - w) / 24, 2.3 * 0.8 * (39 - w) / 24) for w in range(16, 40, 2)]
    assert told == [pytest.approx(tuple(scales)) for scales in rising + falling]
    assert decided == [
        (16, "ends after 16 gradients at 0.8 of the full rate: plateau, a mean loss of 1 after 1 8 gradients before")
    ]


def test_without_a_schedule_the_weight_decay_is_unchanged():
    expected = Coordinator(as_plan(pl.asp()), workers=2, stop=pl.Stop(updates=1)).expected_update()
    assert (expected.lr_scale, expected.weight_decay_scale) == (1.0, 1.0)


class Telling(pl.controllers.Controller):
    """Puts the scale of the schedule that it sees on record."""

    def begin(self, n):
        return None

    def decide(self, state, observation):
        return state, [pl.controllers.Note("seen", repr((observation.workload, observation.schedule_scale)))] * (
            observation.trigger == "open"
        )


def test_a_controller_receives_the_scale_of_the_next_gradient():
    job = tiny_job(schedule=pl.plans.LinearSchedule(warm_up_until=None))
    run = pl.train(job, protocol=pl.bsp().controlled_by(Telling()), cluster=pl.Cluster(2), stop="gradients=20")
    seen = [json.loads(f"[{each.reason[1:-1]}]") for each in run.history.of(DecisionMade) if each.kind == "seen"]
    assert seen == [[w, pytest.approx(1 - abs(w + 0.5 - 10) / 10)] for w in range(0, 20, 2)]


def test_a_named_job_accepts_the_schedule_of_the_paper():
    pytest.importorskip("sklearn")
    job = load_job("digits(schedule=linear, lr_rule=proportional, lr_is=per_worker, decay_norms=false)")
    assert (job.schedule, job.no_decay_on) == (pl.plans.LinearSchedule(), pl.jobs.BATCH_NORMS)
    job = load_job("""digits(schedule="linear(warm_up_until='epochs=15', weight_decay=none)")""")
    assert job.schedule == pl.plans.LinearSchedule(warm_up_until="epochs=15", weight_decay=None)


def test_jobs_with_different_schedules_are_different_jobs():
    schedules = [
        pl.plans.LinearSchedule(weight_decay=k, warm_up=warm_up) for k in (1, 2.3) for warm_up in ("50%", "25%")
    ]
    assert len({described(tiny_job(schedule=schedule))["schedule"] for schedule in [None, *schedules]}) == 5


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"warm_up": "updates=9"},
            "warm_up='updates=9', expected a workload, for example '50%', 'epochs=5' or 'gradients=500'",
        ),
        ({"check_every": pl.plans.Duration("seconds", 9)}, "check_every=.*expected a workload"),
        ({"total": 90}, "total=90, expected text"),
        ({"warm_up_until": "valley"}, "'valley' is no point of a run"),
        ({"warm_up": None}, "warm_up=None, expected text or a pl.plans.Duration"),
        ({"least_reduction": 1}, "least_reduction=1 is not a number in"),
        ({"weight_decay": -1}, "weight_decay=-1 is not a number in"),
    ],
)
def test_invalid_knobs_are_refused(knobs, said):
    with pytest.raises(UsageError, match=said):
        pl.plans.LinearSchedule(**knobs)


@pytest.mark.parametrize(
    ("knobs", "stop", "said"),
    [
        ({}, "updates=30", "add epochs= or gradients= to the stop, or give the schedule a total"),
        ({"total": "gradients=90"}, "gradients=99", "total is 90 gradients, but the run ends at 99; shorten the run"),
        ({"warm_up": "epochs=20"}, "epochs=10", "total is 120 gradients, but warm_up ends at 240; shorten warm_up"),
        ({"warm_up_until": "60%"}, "gradients=90", "warm_up is 45 gradients, but warm_up_until ends at 54"),
    ],
)
def test_a_schedule_incompatible_with_the_run_is_refused_at_the_start(knobs, stop, said):
    with pytest.raises(UsageError, match=said):
        pl.train(
            tiny_job(schedule=pl.plans.LinearSchedule(**knobs)), protocol="bsp", cluster="2*exp(mean=1)", stop=stop
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "linear"}, "schedule='linear', expected a pl.plans.LinearSchedule"),
        (
            {"schedule": PAPER, "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
            "give a schedule or a scheduler, not both",
        ),
        ({"no_decay_on": nn.BatchNorm1d}, "expected .*class(es)? of Module, such as pl.jobs.BATCH_NORMS"),
        ({"no_decay_on": ["norm"]}, "expected .*class(es)? of Module, such as pl.jobs.BATCH_NORMS"),
    ],
)
def test_a_job_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        tiny_job(**changes)


def test_an_optimizer_without_learning_rate_is_refused():
    job = tiny_job(schedule=PAPER, optimizer=torch.optim.Rprop)
    with pytest.raises(UsageError, match=r"Rprop steps by the signs .*; give another optimizer, or no schedule"):
        pl.train(job, protocol="bsp", cluster="2*exp(mean=1)", stop="epochs=1")
