"""Shares and waiting in the report, on the live page and in the terminal: the numbers of the end's line."""

from io import StringIO

import orjson
import pytest
from rich.console import Console

import paceline as pl
from paceline.core.events import Outcome
from paceline.core.records import GradientArrived, WorkInterrupted
from paceline.recording.run_folder import SavedRun
from paceline.report import share_totals
from paceline.report.curves import groups
from paceline.report.page.data import page_json
from paceline.report.page.page import page
from paceline.report.write import read_runs
from paceline.watch.live_run import LiveRun
from paceline.watch.live_view import LiveView
from paceline.watch.terminal import watch_in_terminal
from share_runs import RANKS, record_in, train

COUNT = 250  # more than the live view keeps


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    record = record_in(folder)
    train(record, COUNT)
    record.end(Outcome.STOPPED, "the script has ended")
    return folder, record.gain


def live(folder):
    run = LiveRun(SavedRun(folder))
    for record in run.run.history:
        run.add([record])
    return LiveView(run)


def test_the_headline_is_the_line_at_the_end_of_the_run(shared):
    folder, gain = shared
    [run] = read_runs([folder])
    text = page([run], groups([run]))
    assert f"with balanced(m=8, leases=1): {gain}" in text
    assert gain.ratio > 1.2
    assert "seed" not in run.label
    assert live(folder).headline.endswith(f": {gain}")


def test_the_waiting_of_each_rank_is_in_the_report_and_live(shared):
    folder, gain = shared
    [run] = read_runs([folder])
    activities = run.shares.activities()
    assert [*activities] == [*range(RANKS)]
    assert all(sum(each.values()) == pytest.approx(gain.seconds) for each in activities.values())
    assert activities[2]["waiting"] < min(activities[rank]["waiting"] for rank in (0, 1))  # which is slow
    assert live(folder).live.shares.activities() == activities
    shown = f"rank 0: {activities[0]['waiting']:.4g} s"
    assert shown in page([run], groups([run]))
    assert shown in live(folder).texts()["bars"]


def test_the_charts_have_the_samples_of_each_rank(shared):
    folder, _ = shared
    [run] = read_runs([folder])
    in_report = orjson.loads(page_json([run], groups([run])))["runs"][0]["shares"]
    in_page = orjson.loads(orjson.dumps(live(folder).tasks()["shares"]))
    for found in (in_report, in_page):
        rows = [[value for value in row if value is not None] for row in found["mean"]]
        assert found["equal"] == 16
        assert [row[0] for row in rows] == [16, 16, 16]
        assert [row[-1] for row in rows] == [pytest.approx(each) for each in run.shares.latest.samples]
        assert rows[2][-1] < 16


def test_a_simulated_run_shows_what_its_shares_have_gained(tmp_path):
    cluster = pl.Cluster(3, timing=pl.timing.Deterministic(1.0), speed=[1, 1, 0.5])
    pl.train(
        pl.jobs.digits(), protocol="balanced(m=8, leases=1)", cluster=cluster, stop="updates=30", out=tmp_path / "a"
    )
    [run] = read_runs([tmp_path / "a"])
    assert run.shares.gain.updates == 30
    assert 60 - 3 < run.shares.gain.equal_s < 60  # nothing is claimed before a sample's cost is known


def test_a_queue_shows_the_samples_of_an_update_and_its_leases(tmp_path, monkeypatch):
    monkeypatch.setattr(share_totals, "MOST_KEPT", 60)
    folder, cluster = tmp_path / "a", pl.Cluster(3, pl.timing.LogNormal(1.0, 0.2))
    pl.train(pl.jobs.digits(), protocol="balanced(m=8)", cluster=cluster, stop="updates=40", out=folder)
    [run] = read_runs([folder])
    used = [record for record in run.run.history.of(GradientArrived) if record.used]
    repeated = [*run.run.history.of(WorkInterrupted)]
    expected = f"{len(used) / 3 / 40:.1f} leases of a rank in an update, of which other ranks repeated "
    assert len(used) > 3 * 40
    assert repeated
    expected += f"{len(repeated) / len(used):.1%}; waiting for the end of the queue took "
    assert expected in page([run], groups([run]))
    assert expected in live(folder).texts()["bars"]
    console = Console(width=300, record=True, file=StringIO())
    watch_in_terminal(folder, console)
    assert expected in console.export_text()
    equal = run.run.configuration["batch_size"]
    for rows in (run.shares.share_map(3).mean_s, live(folder).live.shares.share_map(3).mean_s):
        assert rows.sum(axis=0) == pytest.approx(3 * equal)
        assert rows.shape[1] > 10, "the first updates are there too"


def test_other_protocols_have_no_shares(tmp_path):
    pl.train(pl.jobs.digits(), protocol="bsp", cluster=pl.Cluster(3), stop="updates=3", out=tmp_path / "a")
    [run] = read_runs([tmp_path / "a"])
    assert run.shares is None
    assert "Who waited" not in page([run], groups([run]))
    assert live(tmp_path / "a").tasks()["shares"] is None


def test_the_terminal_shows_samples_and_waiting_within_80_columns(shared):
    folder, gain = shared
    console = Console(width=80, record=True, file=StringIO())
    watch_in_terminal(folder, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert str(gain).split(";")[0] in " ".join(lines)
    head = next(line.split() for line in lines if "waited" in line)
    assert head[head.index("samples") + 1] == "waited"
    assert not any("versions sent" in line for line in lines)
