"""A comparison is the single runs in a table; it goes on where it was, and says what it does not know."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import paceline as pl
from broken_parts import BrokenController, kill_this_process
from paceline.cli import main
from paceline.experiments.comparison import ComparisonRow, FailedRunsError
from paceline.experiments.runner.ending import Crash, is_finished
from paceline.experiments.runner.progress import ProgressBars
from paceline.recording.run_folder import EVENTS
from paceline.recording.run_stats import RunStats, count
from paths import environment
from tiny_jobs import dataset, sgd, tiny_job

CLUSTER = pl.Cluster(4, timing=pl.Exponential(1.0))
PROTOCOLS = ["bsp", "k_sync(k=2)"]


def compare(out, protocols=PROTOCOLS, job=None, **options):
    asked = {"cluster": CLUSTER, "stop": "updates=12", "seeds": 2, "processes": 1, **options}
    return pl.compare(job or tiny_job(), protocols=protocols, out=out, **asked)


def logs(folder):
    """Return what tells whether a run was done again: its file, when it was written, and its content."""
    return {
        str(path.parent.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob(EVENTS)
    }


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_run_is_the_one_that_train_makes(tmp_path, processes):
    comparison = compare(tmp_path / "all", processes=processes)
    assert [(row.protocol, list(row.runs)) for row in comparison.rows] == [("bsp", [0, 1]), ("k_sync(k=2)", [0, 1])]
    for row in comparison.rows:
        for seed, figures in row.runs.items():
            alone = pl.train(tiny_job(), protocol=row.protocol, cluster=CLUSTER, stop="updates=12", seed=seed)
            assert figures == count(alone.history)
    assert sorted(logs(tmp_path / "all")) == ["bsp/seed-0", "bsp/seed-1", "k_sync-k-2/seed-0", "k_sync-k-2/seed-1"]
    assert (tmp_path / "all/table.txt").read_text() == comparison.text()
    assert (tmp_path / "all/table.json").read_bytes() == comparison.to_json()


@pytest.mark.parametrize(
    "stop",
    [
        lambda log: b"".join(log.splitlines(keepends=True)[:-1]),
        lambda log: log[:-1],
        lambda log: log.replace(b'"outcome":"updates"', b'"outcome":"interrupted"'),
    ],
    ids=["killed", "cut short", "interrupted"],
)
@pytest.mark.filterwarnings("ignore:.*ended in the middle of a line")
def test_asked_again_it_does_only_what_is_missing(tmp_path, stop):
    whole = compare(tmp_path)
    before = logs(tmp_path)
    stopped = tmp_path / "bsp/seed-1" / EVENTS
    stopped.write_bytes(stop(stopped.read_bytes()))
    assert [is_finished(stopped.parent), is_finished(tmp_path / "bsp/seed-0")] == [False, True]
    again = compare(tmp_path)
    after = logs(tmp_path)
    assert again.to_json() == whole.to_json()
    assert {name for name in before if before[name] != after[name]} == {"bsp/seed-1"}
    assert before["bsp/seed-1"][2] == after["bsp/seed-1"][2]


class Heard:
    """A display that remembers, and sends Ctrl-C when the first run has ended."""

    def __init__(self, interrupts=False):
        self.interrupts = interrupts
        self.ended = []
        self.finished = 0

    def plan(self, cells, finished):
        self.finished = finished

    def begin(self, cell):
        pass

    def show(self, cell, news):
        pass

    def end(self, cell, time_s, reason):
        self.ended.append((cell, reason))
        if self.interrupts:
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_comparison_goes_on(tmp_path, processes):
    asked = {"processes": processes, "protocols": PROTOCOLS[:1], "seeds": 4}
    stopped = compare(tmp_path, **asked, display=Heard(interrupts=True))
    assert stopped.interrupted
    assert not (tmp_path / "table.txt").exists()
    finished = {name: log for name, log in logs(tmp_path).items() if is_finished(tmp_path / name)}
    assert 1 <= len(finished) < 4
    heard = Heard()
    whole = compare(tmp_path, **asked, display=heard)
    assert not whole.interrupted
    assert heard.finished == len(finished) == 4 - len(heard.ended)
    assert finished.items() <= logs(tmp_path).items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stop": "updates=13"}, "stop Stop(updates=12), now Stop(updates=13)"),
        ({"seeds": 3}, "seeds [0, 1], now [0, 1, 2]"),
        (
            {"protocols": ["bsp", "asp"]},
            "k_sync(k=2), now not set; protocols asp not set, now asp",
        ),
        ({"job": tiny_job(batch_size=4)}, "job batch_size 8, now 4"),
        ({"job": tiny_job(optimizer=sgd(lr=0.2))}, "SGD(lr=0.1, momentum=0.9), now torch.optim.sgd.SGD(lr=0.2"),
    ],
)
def test_another_question_in_the_same_folder_is_refused(tmp_path, change, words):
    compare(tmp_path)
    with pytest.raises(pl.UsageError, match="contains another comparison") as refusal:
        compare(tmp_path, **change)
    assert words in str(refusal.value)
    compare(tmp_path)  # and the folder is not locked


def test_a_folder_with_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(pl.UsageError, match="is not the folder of a comparison"):
        compare(tmp_path)


def test_two_comparisons_at_a_time_in_a_folder_are_refused(tmp_path):
    class Nosy(Heard):
        def plan(self, cells, finished):
            with pytest.raises(pl.UsageError, match="another comparison is writing to"):
                compare(tmp_path)
            self.finished = -1

    heard = Nosy()
    compare(tmp_path, display=heard)
    assert heard.finished == -1


def test_without_a_folder_it_finds_what_waits_to_go_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare(None, display=Heard(interrupts=True)).folder == Path("runs/compare-tiny-1")
    assert compare(None, stop="updates=3").folder == Path("runs/compare-tiny-2")
    assert compare(None).folder == Path("runs/compare-tiny-1")
    assert compare(None).folder == Path("runs/compare-tiny-3")


def crashed(*arguments, **options):
    """Return the comparison of which runs crashed, and the error that it raised."""
    with pytest.raises(FailedRunsError) as failure:
        compare(*arguments, **options)
    return failure.value.comparison, str(failure.value)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_crashes_is_raised_after_the_others_are_done_and_saved(tmp_path, processes):
    protocols = {"mine": pl.bsp().controlled_by(BrokenController()), "asp": pl.asp()}
    comparison, error = crashed(tmp_path, protocols, processes=processes)
    files = {f"mine, seed {seed}": tmp_path / f"mine/seed-{seed}/error.txt" for seed in (0, 1)}
    assert {run: str(crash) for run, crash in comparison.failures.items()} == {
        run: f"ValueError: my mistake ({file})" for run, file in files.items()
    }
    for file in files.values():
        place = "controller BrokenController() failed after update 0"
        assert file.read_text().startswith(f"ValueError: my mistake\n\n{place}:\nTraceback")
        assert "broken_parts.py" in file.read_text()
    assert error.startswith(f"2 of 4 runs failed: mine, seed 0: ValueError: my mistake ({files['mine, seed 0']}); mine")
    assert "mine, seed 1 failed: ValueError: my mistake" in comparison.text()
    assert re.search(r"^mine +failed +- ", comparison.text(), re.MULTILINE)
    assert len(comparison.rows[1].runs) == 2
    assert (tmp_path / "table.txt").read_text() == comparison.text()
    row = json.loads((tmp_path / "table.json").read_text())["rows"][0]
    assert (row["failed"], row["missed"], row["runs"][0]["status"]) == (2, 0, "failed")
    assert row["runs"][0]["error"] == "ValueError: my mistake"


def test_no_live_worker_is_a_crash(tmp_path):
    asked = {"cluster": pl.Cluster(1, faults=[pl.Fault(0, 3)]), "protocols": "bsp, asp", "seeds": 1}
    comparison, _ = crashed(tmp_path, **asked)
    assert all("no live worker" in crash.message for crash in comparison.failures.values())
    assert list(comparison.failures) == ["bsp, seed 0", "asp, seed 0"]
    heard = Heard()
    crashed(tmp_path, **asked, display=heard)
    assert len(heard.ended) == 2  # both are run again, from the beginning


def test_a_run_that_missed_its_target_is_no_crash(tmp_path):
    heard = Heard()
    comparison = compare(tmp_path, stop="loss=0.0001,updates=12", display=heard)
    assert comparison.failures == {}
    assert {reason for _, reason in heard.ended} == {"missed loss 0.0001: 12 updates made"}
    assert "bsp, seeds 0 and 1 missed loss 0.0001: 12 updates made" in comparison.text()
    assert re.search(r"^bsp +missed +- ", comparison.text(), re.MULTILINE)


def test_a_run_that_diverged_is_no_crash_and_is_not_run_again(tmp_path):
    asked = {"stop": "loss=0.1,max_loss=0.2,updates=50"}
    comparison = compare(tmp_path, **asked)
    assert comparison.failures == {}
    assert re.search(r"^bsp +diverged +- ", comparison.text(), re.MULTILINE)
    heard = Heard()
    compare(tmp_path, **asked, display=heard)
    assert heard.ended == []


FIXED = Path("fixed")


def fails_until_fixed(output, target):
    if not FIXED.exists():
        raise ValueError("my mistake\nin two lines")
    return nn.functional.cross_entropy(output, target)


def test_asked_again_it_runs_the_crashed_ones_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, error = crashed(Path("out"), job=tiny_job(loss=fails_until_fixed))
    assert error.count("ValueError: my mistake (out/") == 4
    FIXED.touch()
    again = compare(Path("out"), job=tiny_job(loss=fails_until_fixed))
    assert not list(Path("out").rglob("error.txt"))
    other = compare(Path("other"), job=tiny_job(loss=fails_until_fixed))
    assert again.to_json() == other.to_json().replace(b'"folder": "other"', b'"folder": "out"')


@pytest.mark.slow
def test_a_process_that_is_killed_fails_its_run_only(tmp_path):
    comparison, _ = crashed(tmp_path, job=tiny_job(loss=kill_this_process), processes=2, seeds=1)
    messages = {crash.message for crash in comparison.failures.values()}
    assert messages == {"its process was killed by SIGKILL, out of memory or kill -9"}


REFUSED = [
    ({"protocols": "bsp, k_sync(k=5)"}, "give k <= 4"),
    ({"protocols": "bsp, bsp"}, "bsp is given twice"),
    ({"protocols": []}, "no protocols are given"),
    ({"seeds": 0}, "seeds=0, expected their number"),
    ({"seeds": [1, 1]}, "different whole numbers"),
    ({"processes": 0}, "processes=0, expected a whole number >= 1"),
    ({"processes": 2, "cluster": pl.LocalCluster(2)}, "runs on a local cluster take real time"),
    ({"job": "digits"}, "expected a pl.Job"),
    ({"stop": "accuracy=0.9"}, "no evaluation data"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, change, words):
    with pytest.raises(pl.UsageError) as refusal:
        compare(tmp_path, **change)
    assert words in str(refusal.value)
    assert logs(tmp_path) == {}
    compare(tmp_path, protocols="bsp", seeds=1, stop="updates=1")  # the folder can be used


def figures(time_s, outcome=pl.Outcome.LOSS, **others):
    return RunStats(stopped_by=outcome, time_s=time_s, worker_s=time_s * 4, **others)


def comparison_of(rows, **options):
    return pl.Comparison([ComparisonRow(*row) for row in rows], pl.Stop(loss=0.2, seconds=60), Path("runs"), **options)


MISSED = figures(60.0, pl.Outcome.SECONDS)
ROWS = [
    ("bsp", {0: figures(20.0), 1: figures(30.0), 2: figures(40.0)}),
    ("asp", {0: figures(12.0), 1: MISSED, 2: figures(13.0)}),
    ("pull(k=2)", {0: figures(10.0), 1: figures(15.0), 2: figures(20.0)}),
    ("backup(k=2)", {0: MISSED, 1: MISSED, 2: MISSED}),
]


def test_what_was_not_reached_is_said_and_never_averaged():
    comparison = comparison_of(ROWS, price=9.0)
    lines = [re.split(r"\s{2,}", line.strip()) for line in comparison.text().splitlines()]
    assert ["bsp", "30.0 (20.0 to 40.0)", "1.00", "0.0333", "0.300"] in lines
    assert ["asp", "2 of 3: 12.5 (12.0 to 13.0)", "-", "0.0139", "0.125"] in lines
    assert ["pull(k=2)", "15.0 (10.0 to 20.0)", "2.00", "0.0167", "0.150"] in lines
    assert ["backup(k=2)", "missed", "-", "-", "-"] in lines
    assert comparison.verdict() == (
        "pull(k=2) won: loss 0.2 in 15.00 s, 2.0 x faster than bsp, while asp missed it with seed 1, "
        "while backup(k=2) missed it with every seed."
    )


def test_json_has_every_run_and_null_for_what_was_not_reached():
    rows = json.loads(comparison_of(ROWS, price=9.0).to_json())["rows"]
    assert [[run["time_to_target_s"] for run in row["runs"]] for row in rows] == [
        [20.0, 30.0, 40.0],
        [12.0, None, 13.0],
        [10.0, 15.0, 20.0],
        [None, None, None],
    ]
    assert [row["reached"] for row in rows] == [3, 2, 3, 0]
    assert rows[1]["time_to_target_s"] == {"mean": 12.5, "least": 12.0, "most": 13.0, "runs": 2, "of": 3}
    assert rows[3]["time_to_target_s"] is rows[3]["cost_to_target"] is rows[3]["runs"][0]["cost_to_target"] is None
    assert rows[0]["cost_to_target"] == pytest.approx(30 * 4 / 3600 * 9)
    assert rows[0]["runs"][0]["loss"] is None  # nan


def test_a_run_that_is_missing_is_not_averaged_either():
    comparison = comparison_of([("bsp", {0: figures(2.0)}, {1: Crash("out of memory")}), ("asp", {}, {}, [0, 1])])
    assert "1 of 2: 2" in comparison.text()
    assert "bsp, seed 1 failed: out of memory" in comparison.text()
    assert "asp, seeds 0 and 1 not finished" in comparison.text()
    assert comparison.verdict() == "No protocol reached loss 0.2 at every seed; 1 run failed."


NOISY = [(20.0, 0.30), (30.0, 0.20), (40.0, 0.25)]


def paired(factor, shift, noise=(0.0, 0.0, 0.0)):
    """Return runs whose times are those of NOISY over a factor, and whose losses are shifted, seed by seed."""
    return {
        seed: figures(time_s / (factor + wobble), loss=loss + shift + wobble)
        for seed, ((time_s, loss), wobble) in enumerate(zip(NOISY, noise, strict=True))
    }


def test_differences_are_intervals_paired_by_seed():
    slight, large = (0.001, 0.0, -0.001), (0.2, -0.1, -0.15)
    rows = [("bsp", paired(1.0, 0.0)), ("fast", paired(2.0, 0.01, slight)), ("like", paired(1.0, 0.0, large))]
    comparison = comparison_of(rows)
    speed_up, loss = comparison.against_first(comparison.rows[1])
    assert speed_up.is_seen
    assert speed_up.interval.low < 2.0 < speed_up.interval.high < 2.01
    assert loss.is_seen
    assert loss.interval.contains(0.01)
    assert not any(each.is_seen for each in comparison.against_first(comparison.rows[2]))
    said = " ".join(comparison.text().split())
    assert "fast against bsp, 95 % intervals over 3 paired seeds: speed-up 2 to 2; training loss +0.00752" in said
    assert "like against bsp, 95 % intervals over 3 paired seeds: speed-up: no significant difference (0.6" in said
    row = json.loads(comparison.to_json())["rows"][1]["against_first"]
    assert row["speed-up"]["is_seen"] is True
    assert row["training loss"]["pairs"] == 3


def test_one_seed_claims_no_interval():
    comparison = comparison_of([("bsp", {0: figures(2.0, loss=0.1)}), ("asp", {0: figures(1.0, loss=0.2)})])
    assert comparison.against_first(comparison.rows[1]) == []
    assert "95 %" not in comparison.text()


def test_times_are_compared_only_where_both_always_reach_the_target():
    runs = {0: figures(12.0, loss=0.2), 1: figures(60.0, pl.Outcome.SECONDS, loss=0.3)}
    comparison = comparison_of([("bsp", {0: figures(20.0, loss=0.2), 1: figures(30.0, loss=0.2)}), ("asp", runs)])
    assert [each.name for each in comparison.against_first(comparison.rows[1])] == ["training loss"]


def test_the_table_fits_80_columns():
    large = figures(123456.7, updates=10_000_000, used=160_000_000, dropped=99_999_999, interrupted=12_345_678)
    name = "bsp@6.25% >> k_batch_async(k=123) >> ringmaster(r=12, stops=true)"
    comparison = comparison_of([(name, {0: large, 1: figures(234567.8), 2: MISSED})], price=2.5)
    assert max(map(len, comparison.text().splitlines())) <= 80
    assert "2 of 3: 179012 (123457 to 234568)" in comparison.text()


def test_without_a_target_the_time_is_the_time_to_the_end(tmp_path):
    comparison = compare(tmp_path)
    assert comparison.goal == "the end"
    assert comparison.time_s(comparison.rows[0]).runs == 2


def test_an_accuracy_is_a_target(tmp_path):
    job = tiny_job(eval_data=dataset())
    comparison = compare(tmp_path, job=job, stop="accuracy=0.4,updates=100", evaluate_every="updates=2")
    assert comparison.goal == "accuracy 0.4"
    assert all(row.always_reaches(comparison.stop) for row in comparison.rows)
    assert "accuracy" in comparison.text()


MODULE = """
from broken_parts import kill_this_process
from tiny_jobs import tiny_job

def job(broken=False):
    return tiny_job(loss=kill_this_process) if broken else tiny_job()
"""


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Run `paceline compare` in a folder of its own; return the status and what it says."""
    (tmp_path / "compared_job.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    asked = ["--protocols", "bsp, asp", "--cluster", "2*exp(mean=1)", "--stop", "updates=5", "--seeds", "2"]

    def run(job, *arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", "compare", job, *asked, "--processes", "1", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


@pytest.mark.slow
def test_the_command_line_compares_a_job_of_ones_own(program):
    status, out, err = program("compared_job:job", "--format", "json", "--price", "2.5", "--processes", "2")
    assert status == 0, err
    assert [row["protocol"] for row in json.loads(out)["rows"]] == ["bsp", "asp"]
    assert len(err.splitlines()) == 4  # one a run, since it is no terminal
    assert out == Path("runs/compare-tiny-1/table.json").read_text()


def test_the_command_line_prints_the_table_and_writes_where_it_is_told(program):
    status, out, _ = program("compared_job:job", "--out", "here")
    assert (status, out) == (0, Path("here/table.txt").read_text())
    assert "All runs and this table are in here." in out
    assert {path.name for path in Path("here").iterdir()} == {"asp", "bsp", "compare.json", "table.json", "table.txt"}
    assert not Path("runs").exists()


def test_without_a_folder_it_says_where_it_wrote(program):
    _, out, _ = program("compared_job:job")
    assert "All runs and this table are in runs/compare-tiny-1." in out
    _, out, _ = program("compared_job:job", "--format", "json")
    assert json.loads(out)["folder"] == "runs/compare-tiny-2"


def test_nobody_wins_where_nothing_was_to_be_reached(tmp_path):
    assert compare(tmp_path).verdict().startswith("The stop has no target, so there is no winner")


@pytest.mark.slow
def test_a_failure_is_status_1_after_the_table(program):
    status, out, err = program("compared_job:job(broken=true)", "--seeds", "1", "--processes", "2")
    assert status == 1
    assert out.count("killed by SIGKILL") == 2
    assert err.splitlines()[-1].startswith("paceline: 2 of 2 runs failed: bsp, seed 0: its process was killed by ")


def test_ctrl_c_is_status_130_and_says_how_to_go_on(program, monkeypatch):
    display = Heard(interrupts=True)  # once, though another run may end meanwhile
    monkeypatch.setattr(ProgressBars, "end", lambda self, *told: display.end(*told))
    status, _, err = program("compared_job:job", "--out", "here")
    assert status == 130
    assert "interrupted; to resume, run the same command with --out here" in err


SCRIPT = """
import paceline as pl
from tiny_jobs import tiny_job

pl.compare(tiny_job(), protocols="bsp, asp", cluster="2*exp(mean=1)", stop="updates=3", processes=2, out="out")
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_compares_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/table.txt").exists()
