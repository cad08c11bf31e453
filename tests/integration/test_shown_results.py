"""Every result shows itself: short in a console, readable when printed, as a table in a notebook; names are escaped."""

import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.switch_timing import SwitchTiming
from paceline.core.events import Outcome
from paceline.experiments.advise.result import Advice, GradientSummary
from paceline.experiments.comparison_row import ComparisonRow
from paceline.experiments.lr_range_test.search import Knee, LRRangeTest
from paceline.experiments.switch_point.bisection import Bisection
from paceline.experiments.switch_point.result import SwitchSearch
from paceline.experiments.switch_point.trials import Trials, TrialSpec
from paceline.protocols.found_for import FoundFor
from paceline.recording.history import History
from paceline.recording.run_stats import RunStats
from paceline.run.config import RunConfig
from paceline.theory import Constants, tradeoff
from paceline.utils.representation import Representation, summarize_value
from paceline.utils.text_table import TextTable
from tiny_jobs import tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
NASTY = "<script>alert('k_sync & co')</script>"


class Large(torch.utils.data.Dataset):
    """A data set that must not be printed."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return torch.zeros(4), torch.tensor(0)

    def __repr__(self):
        return "a sample, " * len(self)


def a_job(**changes):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)))
    return tiny_job(model=model, data=Large(), loss=nn.CrossEntropyLoss(weight=torch.ones(1000)), **changes)


def a_result():
    return pl.train(tiny_job(), protocol="k_sync(k=2)", cluster=CLUSTER, stop="updates=5")


def a_comparison(name="bsp"):
    figures = RunStats(stopped_by=Outcome.LOSS, time_s=2.0, updates=7)
    return pl.results.Comparison(
        rows=[ComparisonRow(protocol=name, runs={0: figures, 1: figures})], stop=pl.Stop(loss=0.2), folder=Path("runs")
    )


def lr_range_test():
    curve = tuple(np.linspace(1, 0, 400))
    return LRRangeTest(
        job="digits",
        protocol="k_sync",
        cluster="4*exp(mean=1)",
        seeds=(0, 1),
        knees=(Knee(k=1, learning_rate=curve[0], is_bound=True, rates=curve, losses=curve),),
    )


def a_search():
    config = RunConfig(job=tiny_job(), plan=parse_plan("bsp"), cluster=CLUSTER, stop=pl.Stop(epochs=2), seed=0)
    trial = TrialSpec(config=config, first="bsp", then="asp")
    timing = SwitchTiming(
        fraction=0.5,
        first="bsp",
        then="asp",
        found_for=FoundFor(file="timing.toml", job="tiny", model="75 parameters", batch_size=8, workers=4),
    )
    tried = (Trials(0.5, (0.92, 0.9), (50.0, 60.0)),)
    return SwitchSearch(
        trial=trial,
        bisection=Bisection(target=0.9, margin=0.01, settings=1),
        seeds=(0, 1),
        folder=Path("runs"),
        alone=tried[0],
        tried=tried,
        timing=timing,
    )


def advice():
    ranking = [
        pl.results.Prediction(
            protocol=name,
            seconds_per_update=1.0,
            gradients_per_s=8.0,
            staleness=0.0,
            updates=9.0,
            seconds=9.0,
            low_s=8.0,
            high_s=10.0,
            wins=5,
        )
        for name in ("bsp", "asp")
    ]
    return Advice(ranking=ranking, seen=GradientSummary(loss=(1.0, 0.9), noise=20.0, curvature=0.3, phi=2.0))


def a_tradeoff():
    return tradeoff([pl.bsp(), pl.asp()], CLUSTER, Constants(L=1, c=0.5, sigma2=1, gamma=0.2, m=1), 0.1, range(1000))


RESULTS = {
    "result": a_result,
    "history": lambda: a_result().history,
    "unread": lambda: History(lambda: pytest.fail("showing a history must not read its log")),
    "totals": lambda: a_result().history.totals,
    "job": a_job,
    "made": lambda: tiny_job(model=partial(nn.Linear, 8, 3), scheduler=partial(StepLR, step_size=3)),
    "comparison": a_comparison,
    "simulated": lambda: pl.simulate("asp", CLUSTER, updates=100),
    "search": a_search,
    "advice": advice,
    "lr_range_test": lr_range_test,
    "knee": lambda: lr_range_test().knees[0],
    "replay": lambda: pl.results.Replay(3, 20, "at line 7"),
    "tradeoff": a_tradeoff,
}


class Markup(HTMLParser):
    """The tags that are open, which must be none at the end, and the text between them."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.words = [], set(), []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_a_result_is_short_readable_and_a_table(make):
    shown = make()
    assert isinstance(shown, Representation)
    assert repr(shown).startswith(f"{type(shown).__name__}(")
    assert len(repr(shown)) <= 500
    assert "\n" not in repr(shown)
    assert "0x" not in repr(shown)
    assert all(len(line) <= 80 and line == line.rstrip() for line in str(shown).splitlines())
    markup = Markup(shown._repr_html_())
    assert markup.open == []
    assert "table" in markup.tags
    assert len("".join(markup.words)) <= 2000


def test_results_show_their_main_figures():
    result = a_result()
    assert repr(result).startswith("Result(stopped_by=updates, reason=5 updates made, time_s=")
    assert "updates=5, used=10, " in repr(result)
    assert "updates      5\n" in str(result)
    assert repr(a_job()).startswith("Job(name=tiny, model=Sequential of 4,000 parameters, ")
    assert "data=Large of 1,000,000, " in repr(a_job())
    assert "optimizer=SGD(lr=0.1, momentum=0.9)" in repr(a_job())
    assert "loss=CrossEntropyLoss" in repr(a_job())
    assert "microbatches=2" in repr(a_job(microbatches=2))
    assert "microbatches" not in repr(a_job())
    assert repr(pl.results.Replay(3, 20, "")) == "Replay(is_same=True, updates=3, decisions=20)"
    assert repr(lr_range_test()) == "LRRangeTest(job=digits, protocol=k_sync, learning_rates={1: 1})"


def test_a_comparison_is_its_table():
    comparison = a_comparison()
    assert str(comparison) + "\n" == comparison.text()
    assert repr(comparison) == "Comparison(goal=loss 0.2, protocols=bsp, reached=2, folder=runs)"
    words = Markup(comparison._repr_html_()).words
    assert {"bsp", "2.00 (2.00 to 2.00)", "7"} <= set(words)


def test_names_are_escaped():
    html = a_comparison(NASTY)._repr_html_() + a_job(name=NASTY)._repr_html_()
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(&#x27;k_sync &amp; co&#x27;)") >= 2


@settings(max_examples=40)
@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(), lambda of: st.lists(of) | st.tuples(of, of)))
def test_the_repr_of_any_value_is_one_short_line(value):
    assert len(summarize_value(value)) <= 60
    assert len(summarize_value(value).splitlines()) <= 1


WORDS = st.lists(st.text("abc(=)", min_size=1, max_size=30), min_size=1, max_size=6).map(" ".join)
CELLS = st.lists(st.text("0123.", max_size=9), min_size=3, max_size=3)


@given(st.lists(st.tuples(WORDS, CELLS), min_size=1, max_size=5))
def test_a_table_of_80_columns_breaks_no_word(rows):
    grid = TextTable(["the\nprotocol", "a", "long\nheading", "c"], [[name, *cells] for name, cells in rows])
    lines = "\n".join(grid.text()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    said = " ".join(lines).split()
    for name, cells in rows:
        for word in [*name.split(), *" ".join(cells).split()]:
            assert word in said


@pytest.mark.slow
def test_a_script_prints_a_result_without_reading_much(tmp_path):
    script = "import paceline as pl; print(pl.simulate('bsp', '2*exp(mean=1)', updates=3, seed=1))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("Simulated\n  workers             2\n")
