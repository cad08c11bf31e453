"""The comparison of `auto` with tuned rates: that a search finds the best rate, and that it runs and resumes."""

from dataclasses import replace
from math import inf, log2

import pytest

import paceline as pl
from papers.auto import run, settings, table, training
from papers.auto.settings import CASES, Case
from papers.auto.training import Tuned, mean_s
from papers.gpt import GPT, gpt
from papers.store import figure_store
from papers.tasks import Where


@pytest.mark.parametrize(("best", "first"), [(0.5, 0.5), (0.09, 2.0), (30.0, 1.0)])
def test_a_search_finds_the_best_rate_to_a_fourth_root_of_two(best, first, monkeypatch, tmp_path):
    """Times that grow with the distance to the best rate; a rate 16 times too large never reaches the target."""

    def reached(case, protocol, lr, rule, seed, most_s, where):
        seconds = 100 * (1 + log2(lr / best) ** 2)
        return {"seconds": seconds if lr < 16 * best and seconds <= most_s else None}

    monkeypatch.setattr(training, "trained", reached)
    case = replace(CASES["digits, B=16"], lr=first)
    grid = training._search(case, "asp", Where(tmp_path))
    found = min(grid, key=grid.get)
    assert abs(log2(found / best)) <= 0.25 + 1e-9
    assert all(abs(2 * log2(rate / first) % 1) < 1e-9 for rate in grid)


def test_a_run_that_misses_the_target_makes_the_mean_infinite():
    assert mean_s([{"seconds": 2.0}, {"seconds": 4.0}]) == 3.0
    assert mean_s([{"seconds": 2.0}, {"seconds": None}]) == inf


def test_the_gpt_has_about_a_million_parameters(tmp_path):
    job = gpt(tmp_path)
    model = job.model()
    assert isinstance(model, GPT)
    assert 0.9e6 < sum(each.numel() for each in model.parameters()) < 1.2e6


@pytest.fixture(scope="module")
def digits():
    """One update, whose imports take seconds."""
    pl.train(pl.jobs.digits(), protocol="bsp", cluster="2*exp(mean=1)", stop="updates=1", progress=False)


@pytest.mark.slow
def test_a_case_runs_and_is_shown(digits, monkeypatch, tmp_path):
    tiny = Case(
        "digits", 32, pl.Cluster(2, pl.timing.Uniform(0.9, 1.1)), 2.1, 1.0, ("asp",), 4, 400, seeds=2, searches=False
    )
    monkeypatch.setitem(CASES, "tiny", tiny)
    monkeypatch.setitem(settings.FINAL_GRADIENTS, "tiny", 8)
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    for figure in ("tuned", "ruled"):
        run.main(["--figure", figure, "--only", "tiny", "--out", str(tmp_path)])
    tuned, ruled = (figure_store(figure, tmp_path).lines() for figure in ("tuned", "ruled"))
    assert [line["asked"]["series"] for line in tuned] == ["asp, own rate"]
    assert [line["asked"]["series"] for line in ruled] == ["auto, noise", "asp, noise"]
    assert all(each["seconds"] is not None for line in (*tuned, *ruled) for each in line["runs"])
    assert ruled[0]["asked"]["lr"] == tuned[0]["lr"] == 1.0
    lines = [
        {"asked": {"case": "tiny", "series": f"{protocol}, own rate"}, "lr": lr, "runs": []}
        for protocol, lr in (("asp", 0.5), ("bsp", 1.0))
    ]
    for task in run.final(lines):
        figure_store("final", tmp_path).add({"asked": task.asked(), **task.carry_out(Where(tmp_path))})
    written = table.tables(tmp_path)
    assert any(line.startswith("| auto, against") for line in written)
    ends = [line for line in written if "+-" in line]
    assert [line.split(" | ")[0] for line in ends[1:]] == [
        "| bsp, own rate",
        "| asp, own rate",
        "| auto, noise",
        "| asp, noise",
    ]
    losses = figure_store("final", tmp_path).lines()
    assert all(0.5 < each["loss"] < 2.5 for line in losses for each in line["runs"])
    assert len({each["loss"] for line in losses for each in line["runs"]}) == 15  # `auto` begins as bsp


def test_every_case_names_protocols_that_its_cluster_can_run():
    for name, case in CASES.items():
        for protocol in ("bsp", "auto", *case.protocols):
            pl.simulate("bsp" if protocol == "auto" else protocol, case.cluster, updates=1)
        assert Tuned(name, "bsp").asked()["case"] == name
    assert settings.six(16) == ("k_sync(k=8)", "k_sync(k=4)", "pull(k=1)", "k_async(k=4)", "asp", "ssp(lead=4)")
