"""Evaluation loss and metrics are those of the whole data set in one batch, and a run stops by them on every engine."""

from dataclasses import replace
from math import exp, inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.core.records import RunEnded, VersionEvaluated
from paceline.jobs.metrics import Averages
from paceline.recording.run_folder import SavedRun
from paceline.worker.evaluation import evaluate
from paceline.worker.torch_utils import build_model
from ranks import Ended
from ranks import run as run_ranks
from tiny_jobs import dataset, tiny_job
from tiny_tokens import token_job
from torchrun import torchrun

FIRST = {"perplexity": ("perplexity", "<=", 6.5), "nll": ("nll", "<=", 1.85)}
EXACT = 1e-12


def measured(job):
    return evaluate(job, build_model(job, 3), 3)


@pytest.mark.parametrize("samples", [8, 50, 3])  # batches of 8: one, uneven, less than one
def test_metrics_are_those_of_the_whole_data_set_in_one_batch(samples):
    job = token_job(samples)
    ours, whole = measured(job), measured(replace(job, batch_size=samples))
    for name in ("loss", "by_sample", "nll", "perplexity"):
        assert ours[name] == pytest.approx(whole[name], rel=EXACT)
    assert ours["loss"] == ours["by_sample"]
    assert ours["perplexity"] == pytest.approx(exp(ours["nll"]), rel=EXACT)
    assert ours["nll"] != pytest.approx(ours["loss"], rel=1e-4)  # tokens are not samples


def test_a_mean_by_batch_counts_the_uneven_last_batch_as_much_as_the_others():
    job = token_job(50)
    each = [measured(replace(job, eval_data=torch.utils.data.Subset(job.eval_data, range(at, min(at + 8, 50)))))
            for at in range(0, 50, 8)]  # fmt: skip
    by_batch = [metrics["loss"] for metrics in each]
    assert measured(job)["by_batch"] == pytest.approx(sum(by_batch) / len(by_batch), rel=EXACT)
    assert measured(job)["by_batch"] != pytest.approx(measured(job)["loss"], rel=1e-4)


@pytest.mark.parametrize("samples", [20, 24])
def test_loss_and_accuracy_of_pairs_are_those_of_the_whole_data_set_in_one_batch(samples):
    job = tiny_job(eval_data=dataset(samples))
    ours, whole = measured(job), measured(replace(job, batch_size=samples))
    assert ours == {name: pytest.approx(value, rel=1e-6) for name, value in whole.items()}


def test_a_loss_metric_replaces_the_evaluation_loss():
    def step(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1]), {"loss": pl.jobs.Average(len(batch[0]), 2)}

    assert measured(tiny_job(loss=None, step=step, eval_data=dataset(20))) == {"loss": 20 / (2 * 3)}


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 9), st.integers(1, 99)), min_size=1, max_size=9))
def test_averages_weight_by_sample_by_batch_and_by_count(batches):
    averages = Averages("job")
    for value, samples, tokens in batches:
        metrics = {"plain": value, "batch": pl.jobs.Average(value), "token": pl.jobs.Average(value * tokens, tokens)}
        averages.add({**metrics, "exp": pl.jobs.Average(value, transform=lambda mean: mean + 1)}, samples)
    means = averages.means()

    def weighted(weight):
        return sum(weight(b) * b[0] for b in batches) / sum(map(weight, batches))

    for name, weight in {"plain": lambda b: b[1], "batch": lambda b: 1, "token": lambda b: b[2]}.items():
        assert means[name] == pytest.approx(weighted(weight), rel=1e-9, abs=1e-9)
    assert means["exp"] == means["batch"] + 1


def test_a_metric_that_counts_nothing_is_nan_and_an_overflow_infinite():
    averages = Averages("job")
    averages.add({"empty": pl.jobs.Average(0, 0), "perplexity": pl.jobs.Average(1e6, 1, exp)}, 1)
    assert str(averages.means()) == str({"empty": nan, "perplexity": inf})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("high", "metric 'nll' is str; expected a number"),
        (
            torch.zeros(3),
            r"metric 'nll' is a Tensor of shape \[3\]; expected a number, a scalar tensor or",
        ),
    ],
)
def test_a_metric_that_is_not_a_number_is_refused_by_name(value, said):
    with pytest.raises(pl.UsageError, match=f"job tiny: {said}"):
        Averages("tiny").add({"nll": value}, 1)


# --- on every engine --------------------------------------------------------------------------------------


def settings(metric, **changes):
    stop = pl.Stop(metric=metric, updates=40)
    return {"protocol": "bsp", "stop": stop, "evaluate_every": "updates=2", "seed": 1, **changes}


def evaluations(records):
    return [(each.version, each.metrics) for each in records if isinstance(each, VersionEvaluated)]


@pytest.mark.slow
@pytest.mark.parametrize("metric", FIRST.values(), ids=FIRST)
def test_a_metric_stops_a_simulated_and_a_local_run_at_the_same_version(metric):
    simulated = pl.train(token_job(), cluster=pl.Cluster(2), **settings(metric))
    local = pl.train(token_job(), cluster=pl.LocalCluster(2), **settings(metric))
    check_stopped(simulated, metric)
    check_stopped(local, metric)
    reached = next(version for version, metrics in evaluations(simulated.history) if metrics[metric[0]] <= metric[2])
    at = dict(evaluations(local.history))
    for version, metrics in evaluations(simulated.history):
        if version < reached and version in at:
            assert at[version] == pytest.approx(metrics, rel=1e-9)


def check_stopped(result, metric):
    """Check outcome, reason and that the time is that of the version which reached the target."""
    name, _, bound = metric
    reaching = next(each for each in result.history.of(VersionEvaluated) if each.metrics[name] <= bound)
    assert (result.stopped_by, result.time_s) == ("metric", reaching.published_s)
    value = f"{reaching.metrics[name]:.6g}"
    assert result.reason == f"{name} {value} of version {reaching.version} reached the target {bound:g}"


@pytest.mark.slow
def test_a_metric_stops_real_ranks_without_a_server():
    asked = settings(FIRST["nll"], protocol="all_reduce")
    end, other = run_ranks(2, token_job(), **asked)
    assert end.stopped_by == other.stopped_by == "metric"
    same_as_simulated(end, 2, asked)


SCRIPT = """
import paceline as pl
from tiny_tokens import token_job

if __name__ == "__main__":
    result = pl.train(token_job(), protocol="bsp", cluster=pl.Torchrun(worker_at_server=True),
                      stop=pl.Stop(metric=("nll", "<=", 1.85), updates=40), evaluate_every="updates=2", seed=1,
                      out="run")
"""


@pytest.mark.slow
def test_a_metric_stops_a_server_with_a_worker_beside_it(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun(tmp_path, "--nproc-per-node", "1", "script.py")
    assert done.returncode == 0, done.stderr
    saved = SavedRun(tmp_path / "run")
    end = Ended(None, list(saved.history), saved.history.of(RunEnded)[0].outcome, "", 0.0, {})
    assert end.stopped_by == "metric"
    same_as_simulated(end, 1, settings(FIRST["nll"]))


def same_as_simulated(end, n, asked):
    simulated = pl.train(token_job(), cluster=pl.Cluster(n), **asked)
    theirs = dict(evaluations(simulated.history))
    shared = [(version, metrics) for version, metrics in evaluations(end.records) if version in theirs]
    assert shared
    for version, metrics in shared:
        assert metrics == pytest.approx(theirs[version], rel=1e-9)
