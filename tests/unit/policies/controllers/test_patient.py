"""`patient`: which updates it closes, on clusters whose best quorum is known."""

import pytest

import paceline as pl
from paceline.coordinator.coordinator import Coordinator
from paceline.core import events
from paceline.core.stop import Stop
from paceline.engines.virtual.timing import TimedWorkers
from paceline.errors import PacelineWarning
from paceline.protocols.protocol import Phase, Plan
from selections import parametrize_few
from tiny_jobs import tiny_job

N = 16
STEADY = pl.timing.Uniform(0.98, 1.02)


def updates_of(cluster, phi, base="k_sync", seconds=120.0):
    """Return (time, gradients, reason) of each update under `patient` with a known phi."""
    found = []
    engine = TimedWorkers(cluster, seed=1)

    def observe(now, event, commands):
        applied = [each for each in commands if isinstance(each, events.Apply)]
        found.extend((engine.now, len(each.gradients), each.reason) for each in applied)

    phase = Phase(pl.patient(base=base).protocol, controllers=(pl.controllers.Patient(phi=phi),))
    with engine.loop() as loop:
        loop.run(Coordinator(Plan((phase,)), workers=cluster.n, stop=Stop(seconds=seconds)), observe)
    return found


@pytest.mark.slow
def test_it_waits_for_all_while_all_are_alike():
    sizes = [k for _, k, _ in updates_of(pl.Cluster(N, STEADY), phi=10.0)]
    assert sum(sizes) > 0.98 * N * len(sizes)


def test_it_leaves_slow_workers_out_while_they_are_slow():
    slow = pl.timing.Slowdown(at_s=40, until_s=80, factor=5, workers=0.5)
    found = updates_of(pl.Cluster(N, STEADY, slowdowns=[slow]), phi=10.0)
    before, during, after = (
        [k for at_s, k, _ in found if begun <= at_s < end] for begun, end in ((10, 40), (50, 79), (90, 120))
    )
    assert min(before) >= 14
    assert sorted(during)[len(during) // 2] == 8
    assert sum(after) / len(after) > 14
    assert len(during) > 20


def test_little_noise_needs_few_gradients():
    cluster = pl.Cluster(N, pl.timing.ShiftedExponential(0.3, 0.7))
    few, many = ([k for _, k, _ in updates_of(cluster, phi, seconds=30.0)][10:] for phi in (0.1, 1000.0))
    assert sum(few) / len(few) < 2
    assert sum(many) / len(many) > 5


def test_the_reason_has_both_gains():
    reasons = [reason for *_, reason in updates_of(pl.Cluster(N, pl.timing.Exponential(1.0)), phi=1.0, seconds=10.0)]
    assert reasons[0] == "every live worker has contributed"
    assert "less than the" in reasons[-1]
    assert "phi 1" in reasons[-1]


@parametrize_few("base", ["backup", "pull", "k_batch_sync"], keep=1)
def test_other_bases_close_early_too(base):
    cluster = pl.Cluster(N, pl.timing.Exponential(1.0))
    sizes = [k for _, k, _ in updates_of(cluster, 2.0, base, seconds=20.0)]
    assert len(sizes) > 20
    assert min(sizes[5:]) < N // 2


@pytest.mark.slow
def test_a_cluster_that_becomes_five_times_slower_is_followed():
    slower = pl.timing.Slowdown(at_s=60, until_s=1e9, factor=5, workers=1.0)
    cluster = pl.Cluster(N, pl.timing.Gamma(16, 1.0), slowdowns=[slower])
    late = [k for at_s, k, _ in updates_of(cluster, phi=50.0, seconds=500.0) if at_s > 300]
    assert sum(late) / len(late) > 7


@pytest.mark.slow
def test_a_gain_per_second_that_is_out_of_reach_does_not_count():
    faster = pl.timing.Slowdown(at_s=0, until_s=40, factor=0.2, workers=1.0)
    found = updates_of(pl.Cluster(N, STEADY, slowdowns=[faster]), phi=10.0, seconds=70.0)
    after = [k for at_s, k, _ in found if at_s > 41]
    assert min(after[-15:]) > 12


@pytest.mark.slow
def test_it_trains_with_the_rule_noise():
    cluster = pl.Cluster(
        4, pl.timing.ShiftedExponential(0.3, 0.7), faults=[pl.Fault(worker=1, draw=20, back_after_s=2.0)]
    )
    run = pl.train(tiny_job(), protocol="bsp@updates=5 >> patient", cluster=cluster, stop="updates=60")
    sizes = {update.k for update in run.history.of(pl.callbacks.UpdateMade)}
    assert len(sizes) > 1
    assert run.history.totals.updates == 60


def test_wrong_arguments_are_refused():
    with pytest.raises(pl.UsageError, match="base = 'k_async' is no protocol with k fresh gradients"):
        pl.patient(base="k_async")
    with pytest.raises(pl.UsageError, match="phi"):
        pl.controllers.Patient(phi=0.0)
    with pytest.raises(pl.UsageError, match="patient needs fresh gradients"):
        pl.train(
            tiny_job(),
            protocol=pl.asp().controlled_by(pl.controllers.Patient()),
            cluster="4*exp(mean=1)",
            stop="updates=5",
        )
    with pytest.raises(pl.UsageError, match="needs losses and gradients"):
        pl.simulate("patient", "4*exp(mean=1)", updates=5)
    with pytest.warns(PacelineWarning, match="no effect with one worker"):
        pl.train(tiny_job(), protocol="patient", cluster="1*exp(mean=1)", stop="updates=5")
