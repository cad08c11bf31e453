import json
import re
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files

import pytest

import paceline as pl
from paceline.core.events import END_OF_LOOP, NOT_JOINED, PAUSE
from paceline.core.records import DecisionMade, MemoryShared, VersionEvaluated, WorkerJoined, WorkerLost
from paceline.policies.estimators.timeouts.loss_hazard import loss_hazards
from paceline.report.curves import groups
from paceline.report.page.page import SCRIPTS, page, script
from paceline.report.page.parts import straggler_paragraphs
from paceline.report.run_data import NO_END, read_run
from paceline.report.summary_table import headline, number, row
from paceline.report.worker_stats import live_times, worker_losses
from written_runs import begun, ended, train_run, two_updates, write_run

HOSTILE = "</script><script>alert('1')</script><img src=x onerror=alert(2)> & \"quoted\" {{data}} <!--"


def page_of(*saved, label="a run"):
    runs = [read_run(run, label) for run in saved]
    return page(runs, groups(runs))


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs


def elements(text):
    parser = Elements()
    parser.feed(text)
    return parser


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_page_loads_no_external_resource(tmp_path):
    parser = elements(page_of(train_run(tmp_path / "run")))
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(parser.tags)
    assert not {"src", "href", "action", "srcset"} & {name for name, _ in parser.attributes}
    assert any("default-src 'none'" in (value or "") for _, value in parser.attributes)


def test_user_text_is_always_escaped(tmp_path):
    records = [*two_updates()[:-1], DecisionMade(now_s=4.0, kind="protocol", reason="plain"), ended(4.0, 8.0)]
    plain = elements(page_of(write_run(tmp_path / "plain", records)))
    saved = write_run(
        tmp_path / "hostile",
        [*two_updates(reason=HOSTILE)[:-1], DecisionMade(now_s=4.0, kind="protocol", reason=HOSTILE), ended(4.0, 8.0)],
        job=HOSTILE,
        protocol=HOSTILE,
        cluster=HOSTILE,
        **{HOSTILE: {HOSTILE: HOSTILE}},
    )
    text = page_of(saved, label=HOSTILE)
    hostile = elements(text)
    assert "img" not in hostile.tags
    for tag in ("script", "style", "section", "div", "canvas"):
        assert hostile.tags.count(tag) == plain.tags.count(tag), tag
    assert not [name for name, _ in hostile.attributes if name.startswith("on")]
    assert data_of(text)["groups"][0]["label"] == data_of(text)["runs"][0]["label"] == HOSTILE
    assert [reason for _, reason in data_of(text)["runs"][0]["endings"]] == [HOSTILE]
    assert HOSTILE in unescape(text)


def test_a_running_run_is_marked(tmp_path):
    text = page_of(write_run(tmp_path / "run", two_updates()[:-1]))
    assert NO_END in text.partition("<main>")[0]
    assert NO_END not in page_of(write_run(tmp_path / "whole", two_updates()))


def test_a_run_without_updates_has_a_note(tmp_path):
    text = page_of(write_run(tmp_path / "run", [begun()]))
    assert "no update yet" in text.partition("<main>")[0]
    assert data_of(text)["groups"][0]["lines"]["time"] == {}


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_nan_losses_are_omitted_from_the_curve(tmp_path, loss):
    text = page_of(write_run(tmp_path / "run", two_updates(loss=loss)))
    assert set(data_of(text)["groups"][0]["lines"]["time"]) == {"k"}


def test_the_table_has_the_figures_of_the_run(tmp_path):
    saved = train_run(tmp_path / "run")
    run = read_run(saved, "")
    totals = saved.history.totals
    cells = row(run)
    assert cells["updates"] == totals.updates == 30
    assert (cells["used"], cells["interrupted"]) == (totals.used, totals.interrupted)
    assert (cells["mean k"], cells["idle"]) == (3.0, totals.idle_share)
    assert cells["accuracy"] == saved.history.of(VersionEvaluated)[-1].metrics["accuracy"]
    shown = unescape(page_of(saved))
    assert f">{number(cells['final loss'])}</td>" in shown


def test_the_headline_names_the_winner_and_those_that_missed_the_target_as_the_verdict_of_compare_does(tmp_path):
    stop = {"stop": "loss=5"}
    runs = [read_run(train_run(tmp_path / p, p, **stop), p) for p in ("bsp", "asp")]
    times = {run.protocol: run.stats.time_s for run in runs}
    winner = min(times, key=times.get)
    assert f"{winner} reached loss 5 first" in headline(groups(runs))
    runs.append(read_run(train_run(tmp_path / "late", "pull(k=2)", updates=3), "late"))
    assert headline(groups(runs)).endswith("while pull(k=2) missed it")
    assert "first" not in headline(groups([*runs[2:], *(runs[2:])]))


def test_a_table_has_a_column_for_each_metric_that_a_run_has_and_no_other(tmp_path):
    run = read_run(train_run(tmp_path / "run", "bsp"), "run")
    run.stats.metrics.clear()
    assert "accuracy" not in row(run)
    run.stats.metrics["perplexity"] = 12.5
    assert row(run)["perplexity"] == 12.5


def test_the_stragglers_of_several_runs_are_one_box():
    runs = [(f"k_sync(k=6), seed {seed}", ["worker 7 was 1.8 x slower"]) for seed in range(12)]
    found = straggler_paragraphs([*runs, ("asp", [])])
    assert found.count("class='notice'") == 1
    assert "<summary>Stragglers in 12 of 13 runs. k_sync(k=6), seed 0: worker 7 was 1.8 x slower.</summary>" in found
    assert straggler_paragraphs([("asp", []), ("bsp", [])]) == ""


def test_the_headline_of_one_run_has_its_outcome(tmp_path):
    run = read_run(write_run(tmp_path / "run", two_updates()), "")
    assert headline(groups([run])) == "made up with bsp: updates made after 4 s, loss 1"


def test_the_script_is_one_module_of_all_sources():
    joined = script()
    assert not re.search(r"^\s*(import|export)\b", joined, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function|class|const|let) (\w+)", joined, re.MULTILINE)
    assert len(names) == len(set(names))
    assert len(SCRIPTS) == len(set(SCRIPTS))


def test_each_source_imports_only_what_comes_before_it():
    sources = files("paceline.report").joinpath("page")
    assert {path.name for path in sources.iterdir() if path.name.endswith(".js")} == {f"{n}.js" for n in SCRIPTS}
    for position, name in enumerate(SCRIPTS):
        text = sources.joinpath(f"{name}.js").read_text()
        for imported, source in re.findall(r'^import \{ (.*) \} from "\./(\w+)\.js";$', text, re.MULTILINE):
            assert source in SCRIPTS[:position]
            exported = sources.joinpath(f"{source}.js").read_text()
            for what in imported.split(", "):
                assert re.search(rf"^export (async )?(function|class|const|let) {what}\b", exported, re.MULTILINE)


@pytest.mark.slow
def test_losses_of_workers_are_a_table_with_the_largest_hazard_first(tmp_path):
    faults = [
        pl.Fault(worker=1, draw=3, back_after_s=2.0),
        pl.Fault(worker=1, draw=8, back_after_s=2.0),
        pl.Fault(worker=0, draw=15),
    ]
    saved = train_run(
        tmp_path / "run", cluster=pl.Cluster(4, pl.timing.Deterministic(1.0), faults=faults), protocol="bsp"
    )
    run = read_run(saved, "a run")
    rows = worker_losses(run.losses_of_workers, live_times(run))
    assert [(row.worker, row.losses) for row in rows] == [(1, 2), (0, 1)]
    assert rows[1].live_s == pytest.approx(15.0, abs=1.0)
    hazards = loss_hazards([1, 2, 0, 0], live_times(run))
    assert [row.hazard for row in rows] == [hazards[row.worker] for row in rows]
    assert "Losses of workers" in page_of(saved)
    assert "Losses of workers" not in page_of(train_run(tmp_path / "healthy"))


@pytest.mark.parametrize("reason", [NOT_JOINED, PAUSE, END_OF_LOOP])
def test_a_worker_that_is_late_or_pauses_is_not_lost(reason, tmp_path):
    begin = [begun(2), WorkerLost(now_s=0.0, worker=1, reason=reason)]
    saved = write_run(tmp_path / "late", [*begin, WorkerJoined(now_s=0.5, worker=1), *two_updates()[1:]])
    assert read_run(saved, "late").losses_of_workers == [0, 0]


def test_workers_that_share_memory_are_counted_once(tmp_path):
    begin, *rest = two_updates()
    shared = [MemoryShared(now_s=begin.now_s, worker=1, event_s=0.0)] * 2  # after a loss it shares another one
    told = page_of(write_run(tmp_path / "shared", [begin, *shared, *rest]))
    assert f"a run: 1 of {begin.workers} workers shared memory with the server" in told
    assert "shared memory with" not in page_of(write_run(tmp_path / "sent", two_updates()))


def test_a_late_return_is_no_loss(tmp_path):
    silent = [
        WorkerLost(now_s=4.0, worker=1, reason="silent", silent=True),
        WorkerJoined(now_s=4.5, worker=1, late_return=True),
    ]
    saved = write_run(tmp_path / "returned", [*two_updates()[:-1], *silent, ended(4.5, 9.0)])
    assert read_run(saved, "returned").losses_of_workers == [0, 0]
