"""The reproduction of "Slow and Stale Gradients", on images made up: that it is the paper's, and that it runs."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.errors import UsageError
from paceline.protocols.plan_checks import checked_plan
from papers.slow_and_stale import draw, jobs, run, table
from papers.slow_and_stale.predicted import changes
from papers.slow_and_stale.settings import BOUNDS, CIFAR10, DISTRIBUTIONS, FIGURES, K_SYNC, MINIBATCHES, MNIST, TIMES, C
from papers.slow_and_stale.training import lines_of, runs
from tiny_data import write_images

SAMPLES = 1100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, SAMPLES)
    return folder


# --- the configurations are what the paper says ---------------------------------------------------------------


def test_distributions_match_the_figures():
    assert (DISTRIBUTIONS["exp(1)"].expectation_s, DISTRIBUTIONS["1 + exp(1)"].expectation_s) == (1, 2)
    assert TIMES["6"].updates == 2000
    assert list(TIMES["5"].laws) == ["exp(1)", "1 + exp(1)", "Pareto(2, 1)"]
    assert set(TIMES["6"].laws) == {"Pareto(2, 1)", "1 + exp(1)"}


def test_mnist_has_the_settings_of_fig_8():
    assert (MNIST.cluster.n, MNIST.batch_size, MNIST.lr, MNIST.regulariser) == (8, 1, 0.01, 0.01)
    assert MNIST.cluster.distribution_of(0) == pl.timing.Exponential(mean_s=1.0)
    quorums = [parse_plan(series.protocol).phases[0].protocol.quorum for series in MNIST.series]
    assert quorums == ["all", 4, 4, 4, 4, 1]


def test_cifar_has_the_settings_of_fig_9():
    assert (CIFAR10.cluster.n, CIFAR10.batch_size, CIFAR10.lr, CIFAR10.regulariser) == (40, 250, 0.01, 0.05)
    assert CIFAR10.cluster.distribution_of(0).expectation_s == 1 / 20
    assert pytest.approx(0.005 * CIFAR10.lr) == C
    schedule = parse_plan(CIFAR10.series[1].protocol).phases[0]
    assert schedule.compensators == (pl.asp() + pl.staleness_lr(C=C)).compensators


def test_k_sync_is_varied_as_in_fig_11_and_12():
    assert (K_SYNC.cluster.n, K_SYNC.batch_size, K_SYNC.lr) == (8, 1, 0.05)
    assert K_SYNC.cluster.distribution_of(0).quantile(np.array([0.0])) == K_SYNC.batch_size
    assert {4, 8} < {parse_plan(series.protocol).phases[0].protocol.quorum for series in K_SYNC.series}


def test_a_round_trip_grows_with_the_minibatch_as_in_fig_13_and_14():
    for series in MINIBATCHES.series:
        case = MINIBATCHES.of(series)
        law = case.cluster.distribution_of(0)
        assert (case.cluster.n, case.batch_size) == (4, series.batch_size)
        assert law.expectation_s == pytest.approx(case.batch_size / 64 + 1)
    assert MNIST.of(MNIST.series[0]) is MNIST


@pytest.mark.parametrize("figure", FIGURES)
def test_every_panel_has_runnable_series_with_distinct_names(figure):
    for case in FIGURES[figure].cases.values():
        assert len({series.name for series in case.series}) == len(case.series)
        for series in case.series:
            case.cluster.check_plan(
                checked_plan(parse_plan(series.protocol), case.cluster.n, total=None, per_epoch=None)
            )


def test_figures_that_show_the_same_runs_run_them_once():
    keys = {figure: {json.dumps(each.asked()) for each in runs(figure, 1)} for figure in FIGURES}
    assert keys["10"] < keys["8"]
    assert keys["11"] == keys["12"]
    assert keys["13"] == keys["14"]
    assert not keys["8"] & keys["11"]


# --- the jobs ---------------------------------------------------------------------------------------------------


def test_the_penalty_applies_only_to_weights(folder):
    job = jobs.make_job(MNIST, 0.01, folder)
    model = job.build_model(0)
    torch.nn.init.normal_(model[1].weight)
    torch.nn.init.normal_(model[1].bias)
    inputs, target = batch = job.data.minibatch(torch.arange(5))
    loss, _ = job.loss_of(model, batch)
    expected = F.cross_entropy(model(inputs), target) + 0.01 * model[1].weight.norm() ** 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    free = torch.autograd.grad(F.cross_entropy(model(inputs), target), model[1].bias)[0]
    assert torch.allclose(model[1].bias.grad, free)


def test_colours_become_grey_in_the_papers_ratio():
    colours = torch.tensor([[100, 0, 0], [0, 100, 0], [0, 0, 100], [255, 255, 255]], dtype=torch.uint8)
    assert jobs.grey(colours.view(4, 3, 1, 1)).flatten().tolist() == [30, 59, 11, 255]


@pytest.mark.slow
@pytest.mark.parametrize(("panel", "least", "most"), [("pixels 0 to 1", 0, 1), ("pixels 0 to 255", 0, 255)])
def test_pixels_are_scaled_as_the_panel_says(folder, panel, least, most):
    inputs, _ = jobs.make_job(FIGURES["9"].cases[panel], 0.01, folder).data.minibatch(torch.arange(SAMPLES))
    assert inputs.shape == (SAMPLES, 1, 32, 32)
    assert least <= inputs.min()
    assert 0.8 * most < inputs.max() <= most * 1.0001


def test_the_probe_is_evaluated_without_delay(folder):
    assert len(jobs.make_job(MNIST, 0.01, folder).eval_data) == 1


# --- from the command to the drawings ---------------------------------------------------------------------------


@pytest.mark.slow
def test_every_figure_is_run_once_tabulated_and_drawn(folder, tmp_path):
    asked = ["--folder", str(folder), "--seeds", "1", "--updates", "2", "--out", str(tmp_path)]
    run.main(asked)
    before = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert set(before) == {"figure5.jsonl", "figure6.jsonl", "figure7.jsonl", "training.jsonl"}
    assert not any(str(folder) in text for text in before.values())
    run.main(asked)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == before
    for figure in FIGURES:
        lines = run.store(figure, tmp_path).lines()
        for case in FIGURES[figure].cases.values():
            assert [line["asked"]["series"] for line in lines_of(case, lines)] == [each.name for each in case.series]
    table.main(tmp_path)
    written = (tmp_path / "tables.md").read_text()
    assert [f"## Figure {figure}" in written for figure in run.ALL] == [True] * len(run.ALL)
    draw.main(tmp_path, tmp_path / "figures")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {f"figure{figure}.svg" for figure in run.ALL}


def test_runs_that_end_early_are_not_saved_as_results():
    with pytest.raises(SystemExit):
        run.main(["--updates", "3"])


def test_a_missing_data_set_is_an_error_with_a_remedy(tmp_path):
    jobs._data.cache_clear()
    with pytest.raises(UsageError, match="fetch mnist"):
        run.main(["--figure", "8", "--folder", str(tmp_path), "--seeds", "1", "--out", str(tmp_path)])


# --- what the tables say ----------------------------------------------------------------------------------------


def line_of(seconds, losses):
    return {"probe_s": seconds, "probe_version": [10 * s for s in seconds], "probe_loss": losses}


def test_values_are_means_of_what_was_measured_nearby():
    line = line_of([80, 95, 105, 130], [9.0, 2.0, 4.0, 1.0])
    assert table.around(line, 100, FIGURES["8"]) == 3
    assert table.around(line, 1000, FIGURES["11"]) == 3
    assert np.isnan(table.around(line, 500, FIGURES["8"]))


def test_the_maximum_is_taken_over_the_second_half():
    assert table.worst(line_of([1, 2, 3, 4], [9.0, 1.0, 2.0, 1.5]), FIGURES["8"]) == 2


def test_the_order_shows_disagreement_between_seeds():
    by_series = {
        "slow": {0: line_of([100], [3.0]), 1: line_of([100], [3.0])},
        "first": {0: line_of([100], [1.0]), 1: line_of([100], [1.5])},
        "second": {0: line_of([100], [2.0]), 1: line_of([100], [1.4])},
    }
    assert table.order(by_series, 100, FIGURES["8"]) == "first ~ second < slow"
    for runs_of in by_series.values():
        for line in runs_of.values():
            line["probe_accuracy"] = line["probe_loss"]
    assert table.order(by_series, 100, FIGURES["10"]) == "slow > second ~ first"


def test_asynchronous_sgd_falls_sooner_and_synchronous_sgd_lower():
    """What the paper draws in Fig. 7, with the constants that we chose for it."""
    told = pl.theory.tradeoff(BOUNDS.protocols, BOUNDS.cluster, BOUNDS.constants, BOUNDS.eta, [1.0, BOUNDS.seconds])
    assert told.best == ["asp", "bsp"]


def test_changes_are_listed_with_their_first_time():
    assert changes([1.0, 2.0, 3.0, 4.0], ["asp", "asp", "bsp", "asp"]) == [(1.0, "asp"), (3.0, "bsp"), (4.0, "asp")]
