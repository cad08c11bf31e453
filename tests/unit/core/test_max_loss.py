"""A run that diverges is ended as a failure, by the loss that its stop allows."""

import pytest

import paceline as pl
from paceline.core.stop import StopMonitor
from tiny_jobs import sgd, tiny_job


def train(lr, stop, **options):
    job = tiny_job(optimizer=sgd(lr=lr))
    return pl.train(job, protocol="asp", cluster=pl.Cluster(12, pl.timing.Exponential(1.0)), stop=stop, **options)


def test_a_run_ends_when_its_mean_loss_reaches_max_loss(tmp_path):
    result = train(60.0, "updates=500,max_loss=20", out=tmp_path / "run")
    assert result.stopped_by == pl.results.Outcome.DIVERGED
    assert result.stopped_by.is_failure
    losses = [record.loss for record in result.history.of(pl.callbacks.GradientArrived) if record.used]
    means = [sum(losses[end - 12 : end]) / 12 for end in range(12, len(losses) + 1)]
    assert [mean >= 20 for mean in means] == [False] * (len(means) - 1) + [True]
    assert result.reason == f"training diverged: mean loss {means[-1]:.6g} reached max_loss 20"
    assert pl.replay(tmp_path / "run").is_same


def test_a_run_that_does_not_diverge_is_unchanged():
    assert train(0.1, "updates=40,max_loss=20").time_s == train(0.1, "updates=40").time_s


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ("max_loss=3", "a run needs an end"),
        ("updates=3,max_loss=0", "max_loss = 0, expected a number > 0"),
        ("loss=2,max_loss=2", "max_loss = 2, expected more than the loss = 2"),
    ],
)
def test_an_invalid_max_loss_is_refused(stop, words):
    with pytest.raises(pl.UsageError) as refusal:
        pl.Stop.parse(stop)
    assert words in str(refusal.value)


def test_the_text_of_a_max_loss_can_be_parsed():
    stop = pl.Stop(epochs=2, max_loss=4.5)
    assert pl.Stop.parse(str(stop)) == stop


def test_max_loss_is_checked_only_over_a_full_window():
    watch = StopMonitor(pl.Stop(updates=99, max_loss=5.0), workers=2, per_epoch=None)
    for update in range(1, 10):
        watch.accept(5.0)
        assert watch.after_update(update, update) is None
    watch.accept(5.0)
    assert watch.after_update(10, 10).outcome == pl.results.Outcome.DIVERGED


def test_losses_count_by_their_samples():
    watch = StopMonitor(pl.Stop(loss=2.0), workers=2, per_epoch=None)
    for update in range(1, 10):
        watch.accept(1.9, samples=8)
        assert watch.after_update(update, update) is None
    watch.accept(4.0, samples=1)  # the plain mean is 2.11
    assert watch.after_update(10, 10).reason == "mean loss 1.92877 reached the target 2"
    again = StopMonitor(pl.Stop(loss=2.0), workers=2, per_epoch=None)
    again.load_state_dict(watch.state_dict())
    assert again.after_update(10, 10) == watch.after_update(10, 10)
    again.load_state_dict({"losses": [2.5] * 10})  # of an early run
    assert again.after_update(10, 10) is None
