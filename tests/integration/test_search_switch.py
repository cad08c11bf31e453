"""`pl.search_switch`: its trials, its saved result, how it resumes, its errors and its command."""

import json
import sys
import tomllib
from math import isnan
from pathlib import Path
from statistics import stdev

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.cli import main
from paceline.core.records import VersionEvaluated
from paceline.experiments.runner.ending import is_finished
from paceline.experiments.runner.progress import ProgressBars
from paceline.recording.run_folder import EVENTS, SavedRun
from paceline.recording.run_stats import count
from recording_display import RecordingDisplay, log_states
from tiny_jobs import dataset, sgd, tiny_job

CLUSTER = pl.Cluster(4, timing=pl.timing.Exponential(1.0))
ALL_KEPT = {"target": 0.01, "margin": 0.0}


def job(**changes):
    return tiny_job(**{"eval_data": dataset(), **changes})


def search(out, searched=None, **changes):
    options = {"cluster": CLUSTER, "stop": "epochs=2", "settings": 2, "runs": 2, "processes": 1, **changes}
    return pl.search_switch(searched or job(), out=out, **options)


@pytest.mark.slow
def test_every_trial_equals_a_run_of_train(tmp_path):
    found = search(tmp_path / "all", seed=3, margin=0.9, settings=1)
    assert [trials.fraction for trials in (found.alone, *found.tried)] == [1, 0.5]
    for trials, protocol in zip((found.alone, *found.tried), ("bsp", "bsp@50% >> asp"), strict=True):
        for seed, accuracy, time_s in zip((3, 4), trials.accuracies, trials.times_s, strict=True):
            alone = pl.train(job(), protocol=protocol, cluster=CLUSTER, stop="epochs=2", seed=seed)
            assert (accuracy, time_s) == (alone.metrics["accuracy"], alone.time_s)
    assert found.bisection.target == sum(found.alone.accuracies) / 2
    assert found.fraction == 0.5
    mean_s = sum(found.alone.times_s) / 2
    assert found.speed_up == pytest.approx(mean_s / (sum(found.tried[0].times_s) / 2))
    assert found.cost == pytest.approx(sum(sum(each.times_s) for each in (found.alone, *found.tried)) / mean_s)
    assert sorted(log_states(tmp_path / "all")) == [
        "bsp-50-asp/seed-3",
        "bsp-50-asp/seed-4",
        "bsp/seed-3",
        "bsp/seed-4",
    ]
    assert (tmp_path / "all/table.txt").read_text() == found.text()


def test_the_result_is_saved_and_used_by_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = search(Path("all"), **ALL_KEPT)
    table = tomllib.loads(Path("all/timing.toml").read_text())
    assert {name: table[name] for name in ("job", "workers", "batch_size", "first", "then", "fraction")} == {
        "job": "tiny",
        "workers": 4,
        "batch_size": 8,
        "first": "bsp",
        "then": "asp",
        "fraction": 0.25,
    }
    assert table["model"].startswith("75 parameters, layers ")
    assert (table["target"], table["margin"], table["two_sided"], table["seeds"]) == (0.01, 0.0, False, [0, 1])
    assert [(each["fraction"], each["accepted"]) for each in table["trials"]] == [(0.5, True), (0.25, True)]
    assert table["trials"][0]["accuracies"] == list(found.tried[0].accuracies)
    assert table["trials"][0]["mean_s"] == pytest.approx(sum(found.tried[0].times_s) / 2)
    assert "first_alone" not in table  # the target was given
    assert isnan(table["speed_up"])
    used = pl.train(job(), protocol="sync_switch(timing=all/timing.toml)", cluster=CLUSTER, stop="epochs=2", seed=0)
    assert used.time_s == found.tried[1].times_s[0]
    with pytest.raises(pl.UsageError, match="was found for workers 4, and this run has 5"):
        pl.train(job(), protocol="sync_switch(timing=all/timing.toml)", cluster=pl.Cluster(5), stop="epochs=2")


@pytest.mark.slow
def test_without_an_accepted_fraction_the_first_protocol_is_kept(tmp_path):
    found = search(tmp_path, target=1.0, margin=0.0, runs=1, first_runs=1, then="k_async(k=2)", first="k_sync(k=2)")
    assert [trials.fraction for trials in found.tried] == [0.5, 0.75]
    assert (found.fraction, found.speed_up) == (1.0, 1.0)
    assert "No switch point kept the accuracy: use k_sync(k=2) to the end." in found.text()
    plan = pl.sync_switch(timing=str(tmp_path / "timing.toml"))
    assert str(plan) == "k_sync(k=2)"
    assert len(found.alone.times_s) == 1


@pytest.mark.slow
def test_the_margin_of_the_paper_is_the_deviation_of_the_first_protocol(tmp_path):
    found = search(tmp_path, margin="auto", settings=1, first_runs=3)
    assert len(found.alone.accuracies) == 3
    assert found.bisection.margin == stdev(found.alone.accuracies) > 0
    assert tomllib.loads((tmp_path / "timing.toml").read_text())["margin"] == found.bisection.margin


def after_24_gradients(gradients):
    return float(gradients >= 24)


def begins_late(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, after_24_gradients)


@pytest.mark.slow
def test_the_converged_accuracy_is_read_from_the_evaluations_of_a_run(tmp_path):
    waiting = job(scheduler=begins_late, schedule_unit="gradient")
    options = {"stop": "gradients=80", "evaluate_every": "updates=1", "settings": 1, "runs": 1, **ALL_KEPT}
    found = {name: search(tmp_path / name, waiting, accuracy=name, **options) for name in ("final", "converged")}
    [folder] = (tmp_path / "converged").glob("*/seed-0")
    seen = [each.metrics["accuracy"] for each in SavedRun(folder).history.of(VersionEvaluated)]
    assert len(set(seen[:5])) == 1 < len(set(seen))
    assert found["converged"].tried[0].accuracies == (seen[4],) != (seen[-1],) == found["final"].tried[0].accuracies


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a search that was not interrupted."""
    return search(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "at"), [(1, 1), (1, 5), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_an_interrupted_search_resumes_without_repeating_a_run(tmp_path, whole, processes, at):
    out = tmp_path / "parted"
    stopped = search(out, processes=processes, display=RecordingDisplay(at))
    assert (stopped.interrupted, stopped.fraction) == (True, None)
    assert "The search was interrupted." in stopped.text()
    assert not (out / "timing.toml").exists()
    before = {name: log for name, log in log_states(out).items() if is_finished(out / name)}
    assert len(before) >= at
    display = RecordingDisplay()
    again = search(out, processes=processes, display=display)
    assert display.planned == (6, len(before))
    assert len(display.ended) == 6 - len(before)
    assert before.items() <= log_states(out).items()
    assert again.as_table() == whole.as_table()


@pytest.mark.slow
def test_repeating_a_finished_search_runs_nothing(whole):
    before = log_states(whole.folder)
    display = RecordingDisplay()
    search(whole.folder, display=display)
    assert (display.ended, display.planned) == ([], (6, 6))
    assert log_states(whole.folder) == before


@pytest.mark.slow
def test_without_a_folder_an_interrupted_call_is_found_and_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"settings": 1, "runs": 1, **ALL_KEPT}
    assert search(None, **small, display=RecordingDisplay(1)).folder == Path("runs/search-tiny-1")
    assert search(None, **small, seed=1).folder == Path("runs/search-tiny-2")
    assert search(None, **small).folder == Path("runs/search-tiny-1")
    assert search(None, **small).folder == Path("runs/search-tiny-3")


@pytest.mark.slow
def test_another_search_in_the_same_folder_is_refused(whole):
    with pytest.raises(pl.UsageError, match=r"contains another search: margin 0.01, now 0.1; repeat the same call"):
        search(whole.folder, margin=0.1)
    with pytest.raises(pl.UsageError, match="is not the folder of a comparison"):
        pl.compare(job(), protocols="bsp", cluster=CLUSTER, stop="epochs=1", out=whole.folder)


UNSTABLE = {"optimizer": sgd(lr=1.0, momentum=0.9)}
MANY = pl.Cluster(12, timing=pl.timing.Exponential(1.0))


@pytest.mark.slow
def test_a_trial_that_diverges_ends_early_and_fails_its_setting(tmp_path):
    found = search(tmp_path, job(**UNSTABLE), cluster=MANY, stop="epochs=10", settings=1, margin=0.9)
    assert "max_loss=11" in str(found.trial.config.stop)  # ten times log 3
    [trials] = found.tried
    assert trials.diverged == 2
    assert (found.fraction, found.is_accepted(trials)) == (1.0, False)
    assert "2 of 2 diverged" in found.text()
    for seed in (0, 1):
        figures = count(pl.results.History(lambda seed=seed: records(tmp_path / f"bsp-50-asp/seed-{seed}")))
        assert figures.stopped_by == pl.results.Outcome.DIVERGED
        assert figures.used < 120
    assert all(map(isnan, tomllib.loads((tmp_path / "timing.toml").read_text())["trials"][0]["accuracies"]))


def records(folder):
    from paceline.recording.event_log import read_records

    return read_records(folder / EVENTS)


def test_divergence_of_the_first_protocol_is_an_error_and_stores_nothing(tmp_path):
    unstable = job(optimizer=sgd(lr=60.0, momentum=0.9))
    for _ in range(2):  # the second call raises the same error and runs nothing
        with pytest.raises(pl.RunError, match=r"bsp alone diverged \(seed 0, 1\).* no target accuracy; lower"):
            search(tmp_path, unstable, stop="epochs=20")
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"search.json", "bsp"}


@pytest.mark.slow
def test_a_given_max_loss_is_kept(tmp_path):
    found = search(tmp_path, stop="epochs=2,max_loss=1e9", settings=1, **ALL_KEPT)
    assert found.trial.config.stop.max_loss == 1e9


def without_accuracy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def in_percent(model, batch):
    return without_accuracy(model, batch), {"accuracy": 33.0}


class Breaks:
    """A loss that raises an error at its 41st call."""

    def __init__(self):
        self.left = 40

    def __call__(self, output, target):
        self.left -= 1
        if self.left < 0:
            raise ValueError("my mistake")
        return F.cross_entropy(output, target)


def test_a_trial_that_raises_is_reported_with_its_traceback(tmp_path):
    with pytest.raises(pl.RunError, match=r"2 of 2 runs failed: bsp, seed 0: ValueError: my mistake \(.*; bsp, seed 1"):
        search(tmp_path, job(loss=Breaks()), first_runs=2)
    assert "Traceback" in (tmp_path / "bsp/seed-0/error.txt").read_text()


def test_a_run_without_live_workers_is_not_a_divergence(tmp_path):
    with pytest.raises(pl.RunError, match=r"bsp, seed 0: no live worker.*; repeat the same call with out="):
        search(tmp_path, cluster=pl.Cluster(1, faults=[pl.Fault(worker=0, draw=3)]))


REFUSED = [
    ({"searched": tiny_job()}, "has no data to measure an accuracy on; give it eval_data"),
    (
        {"searched": job(loss=None, step=without_accuracy)},
        "the evaluation returns only loss; expected an accuracy",
    ),
    (
        {"searched": job(loss=None, step=in_percent)},
        "the evaluation returns an accuracy of 33; expected an accuracy",
    ),
    ({"searched": "digits"}, "expected a pl.Job"),
    ({"stop": "updates=20"}, "stop updates=20 may end a run before the end of its workload"),
    ({"stop": "epochs=2,seconds=9"}, "give gradients= or epochs="),
    ({"stop": "epochs=2,accuracy=0.9"}, "stop accuracy=0.9 may end a run"),
    ({"first": "bps"}, "'bps' is not known; did you mean 'bsp'?"),
    ({"first": "bsp@3%"}, "first = 'bsp@3%', expected the text of one protocol"),
    ({"then": "bsp"}, "first and then are both bsp; give two different protocols"),
    ({"then": "k_sync(k=5)"}, "give k <= 4"),
    ({"searched": job(optimizer=sgd()), "then": "asp + momentum(rule=i/n)"}, "SGD has no momentum"),
    ({"target": 92.5}, "if this is percent, give 0.925"),
    ({"margin": 1}, "if this is percent, give 0.01"),
    ({"margin": "automatic"}, "margin='automatic', expected"),
    ({"margin": "auto", "runs": 1}, "first_runs is 1; give first_runs=2 or more, or a number as margin"),
    ({"margin": "auto", "target": 0.9}, "first_runs is 0; give first_runs=2 or more"),
    ({"accuracy": "converged"}, "give evaluate_every, for example 'epochs=1'"),
    ({"accuracy": "best"}, "accuracy='best', expected 'final' or 'converged'"),
    ({"settings": 0}, "settings=0 is not a whole number in [1, inf)"),
    ({"runs": 0}, "runs=0 is not a whole number in [1, inf)"),
    ({"first_runs": -1}, "first_runs=-1 is not a whole number in [0, inf)"),
    ({"first_runs": 0}, "first_runs=0 and no target"),
    ({"seed": -1}, "seed=-1 is not a whole number in [0, inf)"),
    ({"processes": 0}, "processes=0, expected a whole number >= 1"),
    ({"two_sided": "yes"}, "two_sided='yes', expected true or false"),
    ({"evaluate_every": "often"}, "is no point of a run"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_invalid_arguments_are_refused_before_the_first_run(tmp_path, change, words):
    with pytest.raises(pl.UsageError) as refusal:
        search(tmp_path / "out", **change)
    assert words in str(refusal.value)
    assert not (tmp_path / "out").exists()


MODULE = """
from tiny_jobs import dataset, sgd, tiny_job

def job(lr=0.1):
    return tiny_job(eval_data=dataset(), optimizer=sgd(lr=lr))
"""


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Run `paceline search` in a folder of its own; return its exit status, stdout and stderr."""
    (tmp_path / "searched_job.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    usual = ["--cluster", "2*exp(mean=1)", "--stop", "epochs=2", "--settings", "1", "--runs", "1", "--processes", "1"]

    def run(job, *arguments, command="search", options=usual):
        monkeypatch.setattr(sys, "argv", ["paceline", command, job, *options, *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return run


def test_the_command_prints_the_table_and_the_next_command(program):
    status, out, err = program("searched_job:job", "--out", "here", "--margin", "0.5")
    assert status == 0, err
    assert out.startswith(Path("here/table.txt").read_text())
    assert len(err.splitlines()) == 2  # one a run, since it is no terminal
    line = out.splitlines()[-1]
    assert line == 'paceline train searched_job:job --protocol "sync_switch(timing=here/timing.toml)" ...'
    options = ["--protocol", "sync_switch(timing=here/timing.toml)", "--cluster", "2*exp(mean=1)", "--stop", "epochs=2"]
    status, _, err = program("searched_job:job", "--out", "run", command="train", options=options)
    assert status == 0, err
    status, _, err = program("searched_job:job", "--cluster", "3*exp(mean=1)", command="train", options=options)
    assert (status, "was found for workers 2, and this run has 3" in err) == (2, True)


def test_the_command_prints_json(program):
    status, out, _ = program("searched_job:job", "--format", "json", "--target", "0.001", "--margin", "0")
    assert status == 0
    result = json.loads(out)
    assert (result["fraction"], result["speed_up"]) == (0.5, None)
    assert Path("runs/search-tiny-1/timing.toml").exists()


def test_divergence_of_the_first_protocol_exits_with_status_1(program):
    status, _, err = program("searched_job:job(lr=1e30)")
    assert (status, "no target accuracy" in err.splitlines()[-1]) == (1, True)


def test_invalid_options_exit_with_status_2(program):
    status, _, err = program("searched_job:job", "--target", "92.5")
    assert (status, "if this is percent, give 0.925" in err) == (2, True)


def test_ctrl_c_exits_with_status_130_and_prints_how_to_resume(program, monkeypatch):
    monkeypatch.setattr(ProgressBars, "end", lambda self, *ending: RecordingDisplay(1).end(*ending))
    status, _, err = program("searched_job:job", "--out", "here")
    assert status == 130
    assert "interrupted; to resume, run the same command with --out here" in err
