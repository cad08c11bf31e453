"""`Stop` by a metric of the job: how it is given, what it refuses, what a replay and a resumed run make of it."""

from dataclasses import fields
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.core.records import VersionEvaluated
from paceline.core.stop import StopMonitor
from paceline.recording.run_folder import EVENTS
from selections import parametrize_few
from tiny_jobs import dataset, tiny_job
from tiny_tokens import sequences, token_job

NLL = ("nll", "<=", 1.4)

# --- how it is given --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "stop"),
    [
        ("nll<=1.4", pl.Stop(metric=NLL)),
        (" nll <= 1.4 , seconds = 600", pl.Stop(metric=NLL, seconds=600)),
        ("f1>=0.9,nll<=1.4", pl.Stop(metric=[("f1", ">=", 0.9), NLL])),
        ("top 5 (%)>=90", pl.Stop(metric=("top 5 (%)", ">=", 90))),
        ("log likelihood>=-1e3", pl.Stop(metric=("log likelihood", ">=", -1000))),
        ("accuracy>=0.97,seconds=600", pl.Stop(accuracy=0.97, seconds=600)),
        ("loss<=0.2", pl.Stop(loss=0.2)),
        ("eval_loss<=0.2", pl.Stop(eval_loss=0.2)),
        ("accuracy=0.9", pl.Stop(metric=("accuracy", ">=", 0.9))),
        ("eval_loss=0.9", pl.Stop(metric=("eval_loss", "<=", 0.9))),
    ],
)
def test_text_and_python_give_the_same_stop(typed, stop):
    assert pl.Stop.parse(typed) == stop
    assert pl.Stop.parse(str(stop)) == stop
    assert eval(repr(stop), {"Stop": pl.Stop}) == stop
    assert hash(stop) == hash(pl.Stop.parse(typed))


known = {field.name for field in fields(pl.Stop)}
names = st.from_regex(r"[^\s,<>=][^,<>=]*", fullmatch=True).map(str.strip).filter(lambda name: name not in known)
targets = st.tuples(names.filter(bool), st.sampled_from(["<=", ">="]), st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(targets, min_size=1, max_size=3, unique_by=lambda target: target[0]))
def test_the_text_of_every_stop_by_metrics_can_be_parsed(given):
    stop = pl.Stop(metric=given, updates=3)
    assert pl.Stop.parse(str(stop)) == stop


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("nll=1.4", "stop condition 'nll' is not known.*; a metric that the job reports is typed as nll<=1.4 or"),
        ("nll<1.4", "stop 'nll<1.4', expected nll<=1.4"),
        ("nll<=low", "stop 'nll<=low', expected a number, as in nll<=10"),
        ("nll<=nan", "expected a finite number as the bound"),
        ("nll<=inf", "expected a finite number as the bound"),
        ("nll<=1,nll<=2", "stop nll is given twice"),
        ("accuracy>=0.9,accuracy=0.8", "stop accuracy is given twice"),
        ("accuracy<=0.9", "stop accuracy<=0.9: a run ends when accuracy is >= a value; expected accuracy=0.9"),
        ("accuracy>=97", "expected a share, as 0.97"),
        ("<=1.4", "stop metric '', expected the name of a metric"),
    ],
)  # fmt: skip
def test_invalid_texts_are_refused(typed, said):
    with pytest.raises(pl.UsageError, match=said):
        pl.Stop.parse(typed)


@pytest.mark.parametrize(
    "metric",
    [(), [], 5, "nll<=1.4", {"nll": 1.4}, ("nll", 1.4), [("nll", 1.4)], ("nll", "=", 1), ("nll", "<=", "1"),
     (3, "<=", 1),
     ("a,b", "<=", 1), ("", "<=", 1), ("nll", "<=", nan), ("nll", "<=", True), [NLL, NLL], ("loss", "<=", 1.0)],
    ids=str,
)  # fmt: skip
def test_invalid_metric_names_are_refused(metric):
    with pytest.raises(pl.UsageError, match=r"(?i)stop"):
        pl.Stop(metric=metric)


# --- what it does -----------------------------------------------------------------------------------------

NOT_FINITE = "stop nll<=1.4: nll of version 7 is not finite (nan or infinite), so it cannot be compared"
MISSING = (
    "stop nll<=1.4: the evaluation reports no metric 'nll'; did you mean 'nlll'?; return it from step as "
    "(loss, {'nll': ...})"
)


@pytest.mark.parametrize(
    ("metrics", "end"),
    [
        ({"nll": 1.4}, ("metric", "nll 1.4 of version 7 reached the target 1.4")),
        ({"nll": 1.41}, None),
        ({"nll": nan}, ("not_finite", NOT_FINITE)),
        ({"nll": inf}, ("not_finite", NOT_FINITE)),
        ({"nlll": 1.0}, ("failed", MISSING)),
        ({"nll": nan, "f1": 0.9}, ("metric", "f1 0.9 of version 7 reached the target 0.9")),
    ],
)
def test_an_evaluation_ends_the_run(metrics, end):
    watch = StopMonitor(pl.Stop(metric=[NLL, ("f1", ">=", 0.9)] if "f1" in metrics else NLL), 1, None)
    assert watch.after_evaluation(7, metrics) == end


def trained(job=None, **options):
    asked = {"protocol": "bsp", "cluster": pl.Cluster(2), "evaluate_every": "updates=2", **options}
    return pl.train(job or token_job(), **asked)


@pytest.mark.parametrize(
    ("stop", "job", "said"),
    [
        ("nl<=1.4", {}, "job tokens: stop nl<=1.4: the evaluation reports no metric 'nl'; did you mean 'nll'?"),
        ("zzz>=1", {}, "no metric 'zzz'; known: by_batch, by_sample, loss, nll, perplexity; return it from step as"),
        ("accuracy=0.9", {}, "stop accuracy>=0.9: the evaluation reports no metric 'accuracy'; known: by_batch"),
        ("nll<=1.4", {"eval_data": None}, "stop nll<=1.4 needs evaluations, but job tokens has no evaluation data;"),
        ("nll<=1.4", {"eval_data": sequences(0)}, "stop nll<=1.4 needs .* job tokens has empty evaluation data"),
        ("updates=3", {"eval_data": sequences(0)}, "job tokens has empty evaluation data"),
    ],
)
def test_a_missing_metric_is_refused_by_name_before_the_run(stop, job, said, tmp_path):
    with pytest.raises(pl.UsageError, match=said):
        trained(token_job(**job), stop=stop, out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_the_check_of_metrics_before_the_run_changes_nothing():
    plain, looked = (trained(stop=stop) for stop in ("updates=6", "updates=6,nll<=0"))
    for ours, theirs in zip(plain.model.parameters(), looked.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def step_to_nan(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss, {"nll": loss / (model[0].bias.detach().abs().max() > 0.5)}  # infinite at first


def test_a_metric_that_is_not_finite_ends_the_run_in_one_line():
    job = tiny_job(loss=None, step=step_to_nan, eval_data=dataset())
    result = trained(job, stop="nll<=1.4,updates=40")
    assert (result.stopped_by, result.history.totals.updates) == ("not_finite", 2)
    assert result.reason == NOT_FINITE.replace("version 7", "version 2")


def test_a_metric_is_checked_once_an_epoch_by_default():
    result = trained(stop="nll<=0,epochs=3", evaluate_every=None)
    assert [each.version for each in result.history.of(VersionEvaluated)] == [3, 6, 9]


@parametrize_few("stop", ["perplexity<=6.3,updates=60", "by_batch>=0.1", "nll<=0,updates=9"], keep=1)
def test_a_run_ended_by_a_metric_is_replayed(stop, tmp_path):
    result = trained(stop=stop, out=tmp_path / "run")
    assert result.stopped_by == ("updates" if "updates=9" in stop else "metric")
    assert pl.replay(tmp_path / "run").difference == ""


def test_a_run_with_an_infinite_metric_is_replayed(tmp_path):
    job = tiny_job(loss=None, step=step_to_nan, eval_data=dataset())
    assert trained(job, stop="nll<=1.4,updates=40", out=tmp_path / "run").stopped_by == "not_finite"
    assert pl.replay(tmp_path / "run").difference == ""


def test_a_metric_that_was_reached_can_be_lowered(tmp_path):
    whole = trained(stop="nll<=1.7", out=tmp_path / "whole")
    first = trained(stop="nll<=1.85", out=tmp_path / "run")
    trained(stop="nll<=1.7", resume=tmp_path / "run")
    assert first.stopped_by == whole.stopped_by == "metric"
    ours, theirs = (run / EVENTS for run in (tmp_path / "run", tmp_path / "whole"))
    assert ours.read_bytes() == theirs.read_bytes()
