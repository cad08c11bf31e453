"""The experiments of DC-S3GD, on images made up: that they are the paper's, and that they run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.core.events import Outcome
from paceline.protocols.plan_checks import checked_plan
from papers.dc_s3gd import draw, run, table, training
from papers.dc_s3gd.jobs import imagenet_job, make_job
from papers.dc_s3gd.settings import ALL, FIGURES, ITERATIONS, MNIST, RESNETS, STRAGGLERS, TABLE_I, Series
from papers.dc_s3gd.times import Iteration, Waiting, played_s, predicted_s
from papers.dc_s3gd.training import Run, runs
from papers.store import Store
from papers.tasks import Where
from selections import parametrize_few
from tiny_data import write_images

SAMPLES = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, SAMPLES)
    return folder


# --- the configurations are what the paper says ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 16])
def test_the_rate_is_n_times_that_of_one_worker(folder, n):
    job = make_job(replace(MNIST, n=n, batch_size=256 * n), folder)
    [group] = job.optimizer(job.build_model(0).parameters()).param_groups
    assert group["lr"] * job.learning_rate.scale(k=n, n=n) == pytest.approx(n * MNIST.lr)
    assert (group["momentum"], group["weight_decay"]) == (0.9, 1e-4)


def test_the_warm_up_ends_at_a_third_of_the_full_rate_and_the_decay_at_nothing():
    curve = MNIST.schedule.in_gradients(9000, per_epoch=100)
    scales = [curve.scale(each, end=curve.until) for each in (0, 750, 1500, 5250, 9000)]
    assert scales == pytest.approx([0, 1 / 6, 1 / 3, 1 / 6, 0])
    assert curve.weight_decay == 2.3


@pytest.mark.parametrize("row", TABLE_I, ids=str)
def test_table_1_has_the_settings_of_the_paper(row):
    tiny = TensorDataset(torch.zeros(1, 3, 32, 32).expand(90_000, -1, -1, -1), torch.zeros(90_000, dtype=torch.long))
    job = imagenet_job(row, tiny)
    assert job.batch_size in {256, 512, 1024}
    curve = job.schedule.in_gradients(None, per_epoch=100)
    assert (curve.warm_up, curve.until, curve.total) == (4500, 2000 if row.nodes >= 64 else 1500, 9000)
    assert job.no_decay_on == pl.jobs.BATCH_NORMS


@pytest.mark.slow
def test_a_model_of_table_1_trains_a_step():
    data = TensorDataset(torch.randn(8, 3, 64, 64), torch.arange(8))
    job = replace(imagenet_job(TABLE_I[0], data), batch_size=4)
    ended = pl.train(
        job, protocol="dc_s3gd", cluster=pl.Cluster(2, pl.timing.Deterministic(1.0)), stop=pl.Stop(updates=1)
    )
    assert ended.history.totals.used == 2


@pytest.mark.parametrize("figure", FIGURES)
def test_every_panel_has_runnable_series_and_whole_minibatches(figure):
    for case in FIGURES[figure].cases.values():
        assert len({series.name for series in case.series}) == len(case.series)
        assert case.setup.minibatch * case.setup.n == case.setup.batch_size
        for series in case.series:
            checked_plan(parse_plan(series.name), case.setup.n, total=None, per_epoch=None)


def test_runs_shared_by_two_figures_run_once():
    keys = {figure: {json.dumps(each.asked()) for each in runs(figure, 1)} for figure in FIGURES}
    assert len(keys["rates"] & keys["table1"]) == len(ALL)
    assert len(keys["rates"] & keys["lambda"]) == len(ALL)
    assert not keys["large-batch"] & keys["table1"]


# --- times ------------------------------------------------------------------------------------------------------------


@parametrize_few("protocol", ITERATIONS.protocols, keep=1)
def test_simulated_iteration_times_match_the_equations(protocol):
    line = Iteration(protocol).carry_out(Where(Path(), updates=40))
    warming_up = 3 / 40 if protocol == "dc_s3gd" else 1e-4  # the first gradients wait for no sum
    assert line["simulated_s"] == pytest.approx(line["predicted_s"], rel=warming_up)


def test_the_equations():
    times_s = {"compute_s": 2.0, "all_reduce_s": 3.0, "there_and_back_s": 4.0}
    assert [predicted_s(each, **times_s) for each in ("all_reduce", "dc_s3gd", "asp")] == [5.0, 3.0, 6.0]


def test_a_busy_server_with_one_link_is_slower_than_eq_15():
    line = Iteration("asp").carry_out(Where(Path(), updates=40))
    slower = np.array(line["on_one_link_s"]) / line["simulated_s"]
    assert slower.min() == 1
    expected = 64 * 3.0 * 64 / 126  # N payloads at the speed at which an all-reduce of 2 (N - 1) / N takes 3 s
    assert line["on_one_link_s"][-1] == pytest.approx(expected, rel=0.03)


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_one_iteration_of_slack_is_between_full_waiting_and_no_waiting(n, rounds, seed):
    compute_s = np.random.default_rng(seed).exponential(size=(rounds, n))
    blocking, slack = (played_s(protocol, compute_s) for protocol in ("all_reduce", "dc_s3gd"))
    assert blocking == pytest.approx(compute_s.max(axis=1).mean())
    assert compute_s.mean(axis=0).max() - 1e-12 <= slack <= blocking + 1e-12


@pytest.mark.slow
@parametrize_few("protocol", ["all_reduce", "dc_s3gd"], keep=1)
@parametrize_few("cluster", ["exp(1)", "1, and 5 for every 50th gradient"], keep=1)
def test_predicted_iteration_times_of_stragglers_match_a_simulation(protocol, cluster):
    line = Waiting(cluster, protocol, seed=0).carry_out(Where(Path(), updates=200))
    assert line["seconds"] == pytest.approx(line["played_s"], rel=0.1)


def test_every_cluster_of_stragglers_matches_its_name():
    one = [cluster.distribution_of(0).expectation_s for cluster in STRAGGLERS.clusters.values()]
    assert one == pytest.approx([1, 1, 1, 1.08, 1, 1])


def test_more_nodes_have_longer_iterations():
    of_512 = [row.iteration_s for row in TABLE_I if row.model == "resnet50" and row.batch_size / row.nodes == 512]
    assert of_512 == pytest.approx([7.88, 8.59, 8.93], abs=0.005)


# --- from the command to the drawings ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("draws", [False, True])
def test_everything_is_run_once_tabulated_and_drawn(draws, folder, tmp_path):
    asked = ["--folder", str(folder), "--seeds", "1", "--out", str(tmp_path)]
    only = ["--only", "^mnist(, .B.=1024, N=4|, lr=0.1|, lamb, lr=[^/]*)?/", "--updates", "2"]
    for figure in ("iterations", "stragglers"):
        run.main([*asked, "--figure", figure, "--updates", "8"])
    for figure in FIGURES:
        run.main([*asked, *only, "--figure", figure])
    before = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert set(before) == {"iterations.jsonl", "stragglers.jsonl", "training.jsonl"}
    assert not any(str(folder) in text for text in before.values())
    run.main([*asked, *only, "--figure", "large-batch"])
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == before
    measured = {"series": "dc_s3gd", "workers": 2, "compute_s": 0.1, "all_reduce_s": 0.15}
    Store(tmp_path / table.MEASURED).add({"asked": measured, "iteration_s": [0.16, 0.17]})
    table.main(tmp_path)
    written = (tmp_path / "tables.md").read_text()
    assert [
        each for each in (*FIGURES, "iterations", "stragglers", "measured", "Table I") if f"## {each}" not in written
    ] == []
    assert "| dc_s3gd | 2 | 0.1 | 0.150 | 0.150 | 0.165 +- 0.064 (0.160 to 0.170) | 1.10 |" in written
    if draws:
        draw.main(tmp_path, tmp_path / "figures")
        drawn = {f"{name}.svg" for name in (*FIGURES, "table1-curves", "iterations", "stragglers")}
        assert {path.name for path in (tmp_path / "figures").iterdir()} == drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", RESNETS)
def test_the_larger_ones_run(folder, name):
    setup = replace(RESNETS[name], n=2, batch_size=4, epochs=1, evaluations=1)
    line = Run(setup, Series("dc_s3gd"), seed=0).carry_out(Where(folder, updates=1))
    assert line["made"] == 1


def test_a_run_that_was_interrupted_is_not_kept(folder, monkeypatch):
    monkeypatch.setattr(training.pl, "train", lambda *_, **__: SimpleNamespace(stopped_by=Outcome.INTERRUPTED))
    with pytest.raises(KeyboardInterrupt):
        Run(MNIST, Series("dc_s3gd"), seed=0).carry_out(Where(folder))


def test_gains_are_paired_by_seed():
    ours, others = ({seed: {"accuracy": seed * factor} for seed in seeds} for seeds, factor in (((1, 2), 2), ((2,), 1)))
    assert table.gains(ours, others) == [2]


def test_a_row_has_the_seeds_of_each_series():
    once, twice = {0: {}}, {0: {}, 1: {}}
    assert [table.seeds_of({"a": twice, "b": each}) for each in (twice, once, {})] == ["2", "1 to 2", "2"]
