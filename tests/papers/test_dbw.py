"""The reproduction of the DBW paper, on images made up: that it runs, and that it measures what it says."""

import json
import re
import struct

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.core.records import DecisionMade
from paceline.errors import UsageError
from paceline.jobs.datasets.images import ImageDataset
from paceline.protocols.plan_checks import checked_plan
from papers.dbw import draw, run, table
from papers.dbw.grid import reasons
from papers.dbw.interrupts import Interrupted
from papers.dbw.settings import FIGURES, RESULTS, cluster
from papers.dbw.traces import Estimate, Truth, estimates, side_by_side, truth
from papers.store import Store
from papers.tasks import Where

SAMPLES = 64


def made_up_images():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, size=SAMPLES)
    images = (labels[:, None, None] * 25 + rng.integers(0, 5, size=(SAMPLES, 28, 28))).astype(np.uint8)
    return images, labels.astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "t10k"):
        for kind, array in zip(("images-idx3", "labels-idx1"), made_up_images(), strict=True):
            head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (tmp_path / f"{split}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return tmp_path


def softmax_job(samples=SAMPLES, batch_size=8, lr=0.05):
    images, labels = made_up_images()
    data = ImageDataset(torch.tensor(images)[:samples, None], torch.tensor(labels)[:samples].long(), [0.5], [0.3])
    return pl.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        data=data,
        batch_size=batch_size,
        loss=nn.functional.cross_entropy,
    )


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_has_compatible_protocols_and_clusters(figure):
    for case in FIGURES[figure].cases.values():
        names = [series.name for series in case.series]
        assert len(set(names)) == len(names)
        for series in case.series:
            case.cluster.check_plan(
                checked_plan(parse_plan(series.protocol), case.cluster.n, total=None, per_epoch=None)
            )


def test_the_static_runs_of_the_paper_have_the_learning_rate_of_the_paper():
    """eta(k) = 0.005 k in Fig. 4 and 6, and 0.05 k / 16 in Fig. 5: the dynamic rate at k = 16, less in proportion."""
    assert (FIGURES["4"].lr, FIGURES["6"].lr, FIGURES["5"].lr) == (16 * 0.005, 16 * 0.005, 0.05)


@pytest.mark.parametrize("alpha", [0, 0.2, 1])
def test_round_trips_take_one_second_on_average(alpha):
    assert cluster(alpha).distribution_of(0).expectation_s == pytest.approx(1)


@pytest.mark.slow
def test_a_figure_is_run_once_tabulated_and_drawn(folder, tmp_path, capsys):
    asked = ["--figure", "8", "--only", r"B=16/(dbw|backup\(k=2\))$", "--folder", str(folder), "--updates", "4"]
    asked += ["--seeds", "1", "--out", str(tmp_path / "results")]
    run.main(asked)
    lines = [json.loads(line) for line in (tmp_path / "results/figure8.jsonl").read_text().splitlines()]
    assert [(line["updates"], line["k"][:1]) for line in lines] == [(4, [16]), (4, [2])]
    assert all(line["probe_loss"][-1] < line["probe_loss"][0] for line in lines)
    run.main(asked)
    assert len((tmp_path / "results/figure8.jsonl").read_text().splitlines()) == 2
    table.main(tmp_path / "results")
    assert "| backup(k=2) | 1 | 0 |" in (tmp_path / "results/tables.md").read_text()
    (tmp_path / "results/figure8.jsonl").rename(tmp_path / "results/figure4.jsonl")
    draw.main(tmp_path / "results", tmp_path / "figures")
    assert "<svg" in (tmp_path / "figures/figure4.svg").read_text()


def test_runs_that_end_early_are_not_saved_as_results():
    with pytest.raises(SystemExit):
        run.main(["--figure", "6", "--updates", "3"])


def test_estimates_equal_those_used_by_dbw():
    result = pl.train(softmax_job(), protocol="dbw(D=3)", cluster=pl.Cluster(4), stop=pl.Stop(updates=20), seed=1)
    decided = [each.reason for each in result.history.of(DecisionMade) if each.kind == "quorum"]
    told = estimates(result.history, 3, 0.05, 4)
    promising = [
        (reason, each)
        for reason, each in zip(decided, told, strict=False)
        if reason.partition(": ")[2].startswith("expects")
    ]
    assert len(promising) > 5
    for reason, each in promising:
        gain, norm, variance = re.search(r"fall by (\S+) in.*\|grad\|\^2 (\S+), variance (\S+),", reason).groups()
        assert (float(gain), float(norm), float(variance)) == pytest.approx(
            (each.gain, each.squared_norm, each.variance), rel=1e-2
        )


def test_reasons_of_a_run_sum_to_its_updates_and_its_time():
    result = pl.train(softmax_job(), protocol="dbw(D=3)", cluster=pl.Cluster(4), stop=pl.Stop(updates=20), seed=1)
    told = reasons(result.history)
    assert set(told) >= {"begin", "best", "rose"}
    assert sum(updates for updates, _ in told.values()) == 20
    assert sum(seconds for _, seconds in told.values()) == pytest.approx(result.time_s, abs=0.01)


def test_the_true_gradient_of_a_version_uses_all_its_minibatches():
    job = softmax_job()
    weights = torch.randn(7850, generator=torch.Generator().manual_seed(0)) * 0.01
    told = truth(job, weights, "cpu")
    model = job.build_model(0)
    nn.utils.vector_to_parameters(weights, model.parameters())
    inputs, target = job.data.minibatch(torch.arange(SAMPLES))
    loss = job.loss(model(inputs), target)
    whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])
    assert told.loss == pytest.approx(loss.item(), rel=1e-5)
    assert told.squared_norm + told.variance / (SAMPLES / 8) == pytest.approx((whole @ whole).item(), rel=1e-4)


def test_a_gain_in_proportion_to_the_decrease_has_rank_correlation_one():
    truths = [Truth(loss, 1.0, 2.0) for loss in (9.0, 5.0, 3.0, 2.0)]
    expected = [Estimate(1, 1.0, 2.0, gain) for gain in (0.4, 0.2, 0.1)]
    told = side_by_side(expected, truths)
    assert told["true"]["decrease"] == [4.0, 2.0, 1.0]
    assert told["rank_correlation"] == 1
    assert told["median_error"] == {"squared_norm": 0, "variance": 0}


@pytest.mark.slow
def test_the_stored_errors_of_times_under_interrupts_are_measured_again():
    for line in Store(RESULTS / "figureinterrupts.jsonl").lines():
        if line["asked"]["series"] != "dbw" and line["asked"]["seed"] < 2:
            asked = line["asked"]
            alpha = float(asked["case"].removeprefix("alpha="))
            again = Interrupted(alpha, asked["series"], asked["seed"]).carry_out(Where(RESULTS))
            assert again["error"] == pytest.approx(line["error"])
            assert again["error"]["pooled"] < again["error"]["by h"]


def test_a_missing_data_set_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(UsageError, match="fetch mnist"):
        run.main(
            ["--figure", "8", "--only", "B=16/dbw$", "--folder", str(tmp_path), "--seeds", "1", "--out", str(tmp_path)]
        )
