"""Evaluation loss and the job's own metrics in the report and in the table of a comparison."""

import re
from html import unescape
from types import SimpleNamespace

import pytest

import paceline as pl
from paceline.core.records import VersionEvaluated
from paceline.recording.run_folder import SavedRun
from paceline.report.curves import Group, groups, panels
from paceline.report.figures import draw_progress, figure_class
from paceline.report.page.page import page
from paceline.report.page.parts import metric_charts
from paceline.report.run_data import read_run
from paceline.report.summary_table import headline, row
from tiny_tokens import token_job

STOP = "nll<=1.88,updates=60"


def runs_of(folder, protocols, stop=STOP, **options):
    for protocol in protocols:
        asked = {"cluster": "3*exp(mean=1)", "stop": stop, "evaluate_every": "updates=2", **options}
        pl.train(token_job(), protocol=protocol, out=folder / protocol, **asked)
    return [read_run(SavedRun(folder / protocol), protocol) for protocol in protocols]


def test_each_metric_has_a_chart_and_metrics_of_the_stop_are_first(tmp_path):
    [run] = runs_of(tmp_path, ["bsp"])
    drawn = groups([run])
    assert list(panels(drawn).items()) == [
        ("loss", "training loss"),
        ("metric nll", "nll"),
        ("metric by_sample", "by_sample"),
        ("metric by_batch", "by_batch"),
        ("metric perplexity", "perplexity"),
        ("metric loss", "evaluation loss"),
        ("k", "quorum k"),
    ]
    evaluations = run.run.history.of(VersionEvaluated)
    line = drawn[0].lines["time"]["metric nll"]
    assert line.mean.tolist() == [each.metrics["nll"] for each in evaluations]
    assert line.x.tolist() == [each.published_s for each in evaluations]
    text = page([run], drawn)
    charts = re.findall(r"<h3>([^<]*)</h3>\s*<div class=['\"]chart['\"] id=['\"]([^'\"]*)", text)
    titles = [(title[:1].upper() + title[1:], name) for name, title in panels(drawn).items()]
    assert charts[:7] == [*titles[:6], ("Quorum k of each update", "k")]


def test_a_metric_without_evaluations_has_no_chart(tmp_path):
    pl.train(token_job(eval_data=None), protocol="bsp", cluster="2*exp(mean=1)", stop="updates=3", out=tmp_path / "run")
    run = read_run(SavedRun(tmp_path / "run"), "run")
    assert list(panels(groups([run]))) == ["loss", "k"]


def test_names_of_metrics_are_escaped():
    name = "<b>'\""
    run = SimpleNamespace(
        rates={"phi": []},
        evaluated=(),
        evaluations=[VersionEvaluated(now_s=0.0, version=1, published_s=0.0, metrics={name: 1.0})],
    )
    shown = metric_charts([Group("", [run], {})])
    assert "<b>" not in shown
    assert unescape(shown).count(name) == 2


@pytest.mark.slow
def test_the_headline_uses_the_target_of_the_stop(tmp_path):
    runs = runs_of(tmp_path, ["bsp", "asp"])
    assert all(run.stats.stopped_by == "metric" for run in runs)
    assert re.search(r"reached nll <= 1\.88 first, in", headline(groups(runs)))
    single = headline(groups(runs[:1]))
    assert f"nll {runs[0].stats.metrics['nll']:.4g}" in single
    late = runs_of(tmp_path / "late", ["bsp", "asp"], stop="nll<=0.1,updates=6")
    lowest = min(late, key=lambda run: run.stats.metrics["nll"])
    assert f"{lowest.protocol} ended with the lowest mean nll" in headline(groups(late))
    higher = runs_of(tmp_path / "higher", ["bsp", "asp"], stop="nll>=9,updates=6")
    highest = max(higher, key=lambda run: run.stats.metrics["nll"])
    assert f"{highest.protocol} ended with the highest mean nll" in headline(groups(higher))


def test_the_rows_have_every_metric(tmp_path):
    [run] = runs_of(tmp_path, ["bsp"])
    cells = row(run)
    for name, value in run.stats.metrics.items():
        assert cells["evaluation loss" if name == "loss" else name] == value


def test_figures_have_one_panel_per_metric(tmp_path):
    drawn = groups(runs_of(tmp_path, ["bsp"]))
    figure = figure_class()()
    draw_progress(figure, drawn, "time")
    assert [axes.get_ylabel() for axes in figure.axes] == list(panels(drawn).values())


@pytest.mark.slow
@pytest.mark.parametrize("stop", [STOP, "eval_loss<=1.88,updates=60"])
def test_a_comparison_uses_the_metric(stop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would be a line of its own
    compared = pl.compare(
        token_job(),
        protocols="bsp, asp",
        cluster="3*exp(mean=1)",
        stop=stop,
        seeds=2,
        evaluate_every="updates=2",
        processes=1,
        out="compared",
    )
    goal, name = ("nll <= 1.88", "nll") if stop == STOP else ("evaluated loss 1.88", "loss")
    text = compared.text()
    assert compared.goal == goal
    assert goal in compared.verdict()
    assert f"seconds to {goal}" in " ".join(text.split()) or goal in text
    assert re.search(rf"\b{name}\n", text)
    assert max(map(len, text.splitlines())) <= 80
    for result in compared.rows:
        for figures in result.runs.values():
            assert figures.reached(compared.stop)
