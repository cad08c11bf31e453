"""The comparison of local steps: that the search and the series run, resume, and are shown."""

from dataclasses import replace

import pytest

import paceline as pl
from papers.diloco import run, settings, table
from papers.store import figure_store


@pytest.fixture(scope="module")
def digits():
    """One update, whose imports take seconds."""
    pl.train(pl.jobs.digits(), protocol="bsp", cluster="2*exp(mean=1)", stop="updates=1", progress=False)


@pytest.fixture
def tiny(digits, monkeypatch):
    """Digits in place of the GPT, and few gradients."""
    monkeypatch.setattr(run, "gpt", lambda folder: replace(pl.jobs.digits(), batch_size=8))
    cases = {name: replace(case, gradients=64) for name, case in settings.CASES.items()}
    for module in (run, table):
        monkeypatch.setattr(module, "CASES", cases)
    monkeypatch.setattr(run, "EVALUATIONS", 2)
    monkeypatch.setattr(run, "OUTERS", settings.OUTERS[:2])


@pytest.mark.slow
def test_the_outer_optimizer_is_searched_and_used(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.best_outer([]) == ""
    run.main(["--figure", "outer", "--out", str(tmp_path)])
    searched = figure_store("outer", tmp_path).lines()
    losses = {line["asked"]["series"]: line["loss"][-1] for line in searched}
    best = run.best_outer(searched)
    assert f"bsp + local_steps(H=16, outer='{best}')" == min(losses, key=losses.get)
    run.main(["--figure", "losses", "--seeds", "2", "--only", "^equal/", "--out", str(tmp_path)])
    run.main(["--figure", "losses", "--seeds", "2", "--only", "^equal/", "--out", str(tmp_path)])  # nothing is repeated
    lines = figure_store("losses", tmp_path).lines()
    assert [line["asked"]["seed"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert {line["pushes"] for line in lines} == {64, 4}
    assert all(len(line["loss"]) == len(line["at_s"]) for line in lines)
    table.main(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert f"| `bsp + local_steps(H=16, outer='{best}')` |" in text
    assert "| 0.062 |" in text
    assert "| `bsp` |" in text


def test_every_series_is_a_plan_that_four_workers_can_run():
    for case in settings.CASES.values():
        for series in case.series:
            plan = series.replace("OUTER", f"'{settings.OUTERS[-1]}'")
            pl.simulate(plan, case.cluster, updates=3)
