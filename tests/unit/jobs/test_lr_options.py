import pickle

import pytest

import paceline as pl
from paceline.checkpoint.fingerprint import described
from paceline.errors import UsageError
from paceline.jobs import load_job, scheduled
from selections import parametrize_few
from tiny_jobs import tiny_job


def rates(job, protocol, updates, cluster="4*exp(mean=1)"):
    """Train, and return the workload before each update and the learning rate that it stepped with."""
    stop = pl.Stop(updates=updates)
    columns = pl.train(job, protocol=protocol, cluster=cluster, stop=stop, seed=0).history.columns()
    return list(zip([0, *columns["workload"]], columns["learning_rate"], strict=False))


@parametrize_few(("protocol", "k"), [("bsp", 4), ("k_sync(k=2)", 2), ("asp", 1)], keep=1)
def test_the_rate_follows_workload_and_quorum_under_every_protocol(protocol, k):
    job = scheduled(tiny_job(), lr_rule="proportional", lr_is="per_worker", decay_at=[8, 16], decay_by=0.5)
    own = job.optimizer(job.build_model(0).parameters()).param_groups[0]["lr"]
    seen = rates(job, protocol, updates=24 // k)
    assert [rate for _, rate in seen] == pytest.approx(
        [own * k * (1 if workload < 8 else 0.5 if workload < 16 else 0.25) for workload, _ in seen]
    )


def test_a_named_job_accepts_learning_rate_options():
    pytest.importorskip("sklearn")
    job = load_job("digits(momentum=0.9, lr_rule=proportional, lr_is=per_worker, decay_at=[32000, 48000])")
    assert (job.lr_rule, job.lr_is, job.schedule_unit) == ("proportional", "per_worker", "gradient")
    optimizer = pickle.loads(pickle.dumps(job)).optimizer(job.build_model(0).parameters())
    assert optimizer.defaults["momentum"] == 0.9
    schedule = job.scheduler(optimizer)
    factor = schedule.lr_lambdas[0]
    assert [factor(gradients) for gradients in (0, 31_999, 32_000, 47_999, 48_000)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01]
    )
    assert described(load_job("digits")) == described(pl.jobs.digits())


def test_jobs_with_different_decays_are_different_jobs():
    one, same, at, by = (
        described(scheduled(tiny_job(), decay_at=at, decay_by=by))["scheduler"]
        for at, by in (([4, 8], 0.1), ([4, 8], 0.1), ([4, 9], 0.1), ([4, 8], 0.2))
    )
    assert one == same
    assert len({one, at, by}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "digits(decay_at=32000)",
            r"decay_at=32000, expected a list .*, such as \[32000, 48000\]",
        ),
        ("digits(decay_at=[0])", "decay_at=0 is not a whole number"),
        ("digits(decay_at=[0.5, 0.75])", "decay_at\\[0\\]=0.5, expected a whole number"),
        ("digits(decay_at=[9, 9])", r"decay_at=\[9, 9\] does not rise"),
        ("digits(decay_by=0)", r"decay_by=0 is not a number in \(0, 1\]"),
        ("digits(lr_rule=linear)", "lr_rule='linear', expected 'constant', 'proportional' or 'noise'"),
        ("digits(lr_iz=total)", "digits has no knob 'lr_iz'; did you mean 'lr_is'"),
        ("digits(momentum=1)", "momentum=1 is not a number in"),
    ],
)
def test_invalid_knobs_are_refused(text, said):
    pytest.importorskip("sklearn")
    with pytest.raises(UsageError, match=said):
        load_job(text)
