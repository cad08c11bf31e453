"""`pl.compare`: its runs, how it resumes, its failures, its errors."""

import json
import os
import re
from pathlib import Path

import pytest
from torch import nn

import paceline as pl
from broken_parts import BrokenController, kill_this_process
from paceline.experiments.comparison import FailedRunsError
from paceline.experiments.runner.ending import is_finished
from paceline.recording.run_folder import EVENTS
from paceline.recording.run_stats import count
from recording_display import RecordingDisplay, log_states
from selections import parametrize_few
from tiny_jobs import dataset, sgd, tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
PROTOCOLS = ["bsp", "k_sync(k=2)"]


def compare(out, protocols=PROTOCOLS, job=None, **changes):
    options = {"cluster": CLUSTER, "stop": "updates=6", "seeds": 2, "processes": 1, **changes}
    return pl.compare(job or tiny_job(), protocols=protocols, out=out, **options)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_every_run_equals_a_run_of_train(tmp_path, processes):
    comparison = compare(tmp_path / "all", processes=processes)
    assert [(row.protocol, list(row.runs)) for row in comparison.rows] == [("bsp", [0, 1]), ("k_sync(k=2)", [0, 1])]
    for row in comparison.rows:
        for seed, stats in row.runs.items():
            alone = pl.train(tiny_job(), protocol=row.protocol, cluster=CLUSTER, stop="updates=6", seed=seed)
            assert stats == count(alone.history)
    assert sorted(log_states(tmp_path / "all")) == [
        "bsp/seed-0",
        "bsp/seed-1",
        "k_sync-k-2/seed-0",
        "k_sync-k-2/seed-1",
    ]
    assert (tmp_path / "all/table.txt").read_text() == comparison.text()
    assert (tmp_path / "all/table.json").read_bytes() == comparison.to_json()


def test_a_folder_whose_name_is_not_utf_8_has_a_table(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    comparison = compare(folder, protocols="bsp", seeds=1)
    assert comparison.folder == folder
    assert "caf\ufffd" in (folder / "table.txt").read_text()
    assert "caf\ufffd" in json.loads((folder / "table.json").read_bytes())["folder"]


@parametrize_few(
    "stop",
    [
        lambda log: b"".join(log.splitlines(keepends=True)[:-1]),
        lambda log: log[:-1],
        lambda log: log.replace(b'"outcome":"updates"', b'"outcome":"interrupted"'),
    ],
    keep=1,
    ids=["killed", "cut short", "interrupted"],
)
@pytest.mark.filterwarnings("ignore:.*ended in the middle of a line")
def test_a_repeated_call_runs_only_the_missing_runs(tmp_path, stop):
    whole = compare(tmp_path)
    before = log_states(tmp_path)
    stopped = tmp_path / "bsp/seed-1" / EVENTS
    stopped.write_bytes(stop(stopped.read_bytes()))
    assert [is_finished(stopped.parent), is_finished(tmp_path / "bsp/seed-0")] == [False, True]
    again = compare(tmp_path)
    after = log_states(tmp_path)
    assert again.to_json() == whole.to_json()
    assert {name for name in before if before[name] != after[name]} == {"bsp/seed-1"}
    assert before["bsp/seed-1"][2] == after["bsp/seed-1"][2]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_comparison_resumes(tmp_path, processes):
    options = {"processes": processes, "protocols": PROTOCOLS[:1], "seeds": 4}
    stopped = compare(tmp_path, **options, display=RecordingDisplay(interrupts_at=1))
    assert stopped.interrupted
    assert not (tmp_path / "table.txt").exists()
    finished = {name: log for name, log in log_states(tmp_path).items() if is_finished(tmp_path / name)}
    assert 1 <= len(finished) < 4
    display = RecordingDisplay()
    whole = compare(tmp_path, **options, display=display)
    assert not whole.interrupted
    assert display.planned[1] == len(finished) == 4 - len(display.ended)
    assert finished.items() <= log_states(tmp_path).items()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    compare(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stop": "updates=7"}, "stop Stop(updates=6), now Stop(updates=7)"),
        ({"seeds": 3}, "seeds [0, 1], now [0, 1, 2]"),
        (
            {"protocols": ["bsp", "asp"]},
            "k_sync(k=2), now not set; protocols asp not set, now asp",
        ),
        ({"job": tiny_job(batch_size=4)}, "job batch_size 8, now 4"),
        ({"job": tiny_job(optimizer=sgd(lr=0.2))}, "SGD(lr=0.1, momentum=0.9), now torch.optim.sgd.SGD(lr=0.2"),
    ],
)
def test_a_folder_of_another_comparison_is_refused(compared, change, words):
    with pytest.raises(pl.UsageError, match="contains another comparison") as refusal:
        compare(compared, **change)
    assert words in str(refusal.value)
    compare(compared)  # and the folder is not locked


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(pl.UsageError, match="is not the folder of a comparison"):
        compare(tmp_path)


@pytest.mark.slow
def test_two_concurrent_comparisons_in_a_folder_are_refused(tmp_path):
    class ComparesAgain(RecordingDisplay):
        def plan(self, cells, finished):
            with pytest.raises(pl.UsageError, match="another comparison is writing to"):
                compare(tmp_path)
            self.is_planned = True

    display = ComparesAgain()
    compare(tmp_path, display=display)
    assert display.is_planned


@pytest.mark.slow
def test_without_a_folder_an_interrupted_call_is_found_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare(None, display=RecordingDisplay(interrupts_at=1)).folder == Path("runs/compare-tiny-1")
    assert compare(None, stop="updates=3").folder == Path("runs/compare-tiny-2")
    assert compare(None).folder == Path("runs/compare-tiny-1")
    assert compare(None).folder == Path("runs/compare-tiny-3")


def failed_comparison(*arguments, **options):
    """Return the comparison with failed runs, and the message of its error."""
    with pytest.raises(FailedRunsError) as failure:
        compare(*arguments, **options)
    return failure.value.comparison, str(failure.value)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failed_run_is_raised_after_the_others_are_finished_and_saved(tmp_path, processes):
    protocols = {"mine": pl.bsp().controlled_by(BrokenController()), "asp": pl.asp()}
    comparison, error = failed_comparison(tmp_path, protocols, processes=processes)
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


def test_a_run_without_live_workers_counts_as_failed(tmp_path):
    options = {"cluster": pl.Cluster(1, faults=[pl.Fault(worker=0, draw=3)]), "protocols": "bsp, asp", "seeds": 1}
    comparison, _ = failed_comparison(tmp_path, **options)
    assert all("no live worker" in crash.message for crash in comparison.failures.values())
    assert list(comparison.failures) == ["bsp, seed 0", "asp, seed 0"]
    display = RecordingDisplay()
    failed_comparison(tmp_path, **options, display=display)
    assert len(display.ended) == 2  # both are run again, from the beginning


@pytest.mark.slow
def test_a_run_that_missed_its_target_does_not_count_as_failed(tmp_path):
    display = RecordingDisplay()
    comparison = compare(tmp_path, stop="loss=0.0001,updates=6", display=display)
    assert comparison.failures == {}
    assert {reason for _, reason in display.ended} == {"missed loss 0.0001: 6 updates made"}
    assert "bsp, seeds 0 and 1 missed loss 0.0001: 6 updates made" in comparison.text()
    assert re.search(r"^bsp +missed +- ", comparison.text(), re.MULTILINE)


@pytest.mark.slow
def test_a_diverged_run_does_not_count_as_failed_and_is_not_repeated(tmp_path):
    options = {"stop": "loss=0.1,max_loss=0.2,updates=50"}
    comparison = compare(tmp_path, **options)
    assert comparison.failures == {}
    assert re.search(r"^bsp +diverged +- ", comparison.text(), re.MULTILINE)
    display = RecordingDisplay()
    compare(tmp_path, **options, display=display)
    assert display.ended == []


FIXED = Path("fixed")


def fails_until_fixed(output, target):
    if not FIXED.exists():
        raise ValueError("my mistake\nin two lines")
    return nn.functional.cross_entropy(output, target)


@pytest.mark.slow
def test_a_repeated_call_runs_failed_runs_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, error = failed_comparison(Path("out"), job=tiny_job(loss=fails_until_fixed))
    assert error.count("ValueError: my mistake (out/") == 4
    FIXED.touch()
    again = compare(Path("out"), job=tiny_job(loss=fails_until_fixed))
    assert not list(Path("out").rglob("error.txt"))
    other = compare(Path("other"), job=tiny_job(loss=fails_until_fixed))
    assert again.to_json() == other.to_json().replace(b'"folder": "other"', b'"folder": "out"')


@pytest.mark.slow
def test_a_killed_process_fails_only_its_own_run(tmp_path):
    comparison, _ = failed_comparison(tmp_path, job=tiny_job(loss=kill_this_process), processes=2, seeds=1)
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
def test_invalid_arguments_are_refused_before_the_first_run(tmp_path, change, words):
    with pytest.raises(pl.UsageError) as refusal:
        compare(tmp_path, **change)
    assert words in str(refusal.value)
    assert log_states(tmp_path) == {}
    compare(tmp_path, protocols="bsp", seeds=1, stop="updates=1")  # the folder can be used


def test_without_a_target_the_time_is_the_duration_of_the_run(tmp_path):
    comparison = compare(tmp_path)
    assert comparison.goal == "the end"
    assert comparison.time_s(comparison.rows[0]).runs == 2


@pytest.mark.slow
def test_an_accuracy_is_a_target(tmp_path):
    job = tiny_job(eval_data=dataset())
    comparison = compare(tmp_path, job=job, stop="accuracy=0.4,updates=100", evaluate_every="updates=2")
    assert comparison.goal == "accuracy 0.4"
    assert all(row.always_reaches(comparison.stop) for row in comparison.rows)
    assert "accuracy" in comparison.text()


@pytest.mark.slow
def test_a_stop_without_target_has_no_winner(tmp_path):
    assert compare(tmp_path).verdict().startswith("The stop has no target, so there is no winner")
