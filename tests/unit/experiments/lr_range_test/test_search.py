"""The knee rule on jobs whose largest stable learning rate is known, and what it is asked for wrongly."""

import json
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.cli import main
from paceline.core.events import Outcome
from paceline.core.records import RunEnded, UpdateMade, VersionEvaluated
from paceline.experiments.lr_range_test.curve import NEAR, Range
from paceline.recording.callback import Memory
from selections import parametrize_few
from tiny_jobs import sgd, tiny_job

CLUSTER = "4*exp(mean=1)"
CURVATURES = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
LARGEST = 2 / 4.0  # learning rate at which SGD on this loss is stable


def line(**changes):
    """Regression on points +-sqrt(3 c / 2) e_i: the Hessian of the mean squared loss is the diagonal of the c."""
    points = torch.diag((3 * CURVATURES / 2).sqrt())
    inputs = torch.cat([points, -points]).repeat(8, 1)
    noise = 0.1 * torch.randn(48, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    settings = {
        "model": lambda: nn.Linear(3, 1, bias=False).double(),
        "loss": F.mse_loss,
        "data": TensorDataset(inputs, inputs @ torch.ones(3, 1, dtype=torch.float64) + noise),
        "optimizer": sgd(lr=0.1),
        "batch_size": 48,
        "name": "line",
    }
    return tiny_job(**{**settings, **changes})


def find(job=None, **changes):
    settings = {"protocol": "k_sync", "k": [4], "cluster": CLUSTER, "lowest": 0.01, "highest": 100.0, "updates": 100}
    return pl.lr_range_test(job or line(), **{**settings, "runs": 1, **changes})


def watched(**changes):
    """Return what was found, and the records of each run by its name."""
    memories = {}

    def watch(title, stop):
        memories[title] = Memory()
        return nullcontext(memories[title])

    found = find(watch=watch, **changes)
    return found, {title: memory.records for title, memory in memories.items()}


def test_the_quadratic_job_has_the_stated_curvatures():
    inputs, _ = line().data.tensors
    assert torch.allclose(2 * inputs.T @ inputs / len(inputs), torch.diag(CURVATURES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "largest"),
    [
        (sgd(), LARGEST),
        (sgd(momentum=0.5), LARGEST * 1.5),  # (1 + momentum) times that of plain SGD
    ],
)
def test_the_knee_is_near_the_largest_stable_rate(optimizer, largest):
    [knee] = find(line(optimizer=optimizer)).knees
    assert largest / 4 < knee.learning_rate < 1.2 * largest  # without noise of gradients a rise is seen late
    place = knee.rates.index(knee.learning_rate)
    lowest = min(knee.losses[: place + 1])
    assert knee.losses[place] <= lowest + NEAR * (knee.losses[0] - min(knee.losses))


@pytest.mark.slow
def test_the_knee_rises_with_k_as_the_largest_stable_rate():
    """Least squares of d Gaussian inputs is stable below m / (m + d + 1), for the mean square of m samples."""
    d, batch_size, ks = 20, 4, (1, 4, 16)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(20_000, d, dtype=torch.float64, generator=draw)
    noise = 0.3 * torch.randn(20_000, 1, dtype=torch.float64, generator=draw)
    job = line(
        model=lambda: nn.Linear(d, 1, bias=False).double(),
        data=TensorDataset(inputs, inputs.sum(dim=1, keepdim=True) + noise),
        batch_size=batch_size,
    )
    found = find(job, k=ks, cluster="16*exp(mean=1)", lowest=0.002, highest=10.0, updates=200).learning_rates
    limits = {k: k * batch_size / (k * batch_size + d + 1) for k in ks}
    assert all(0.4 < found[k] / limits[k] < 1.2 for k in ks)
    assert found[16] / found[1] > 0.6 * limits[16] / limits[1]


@pytest.mark.slow
def test_a_run_that_diverges_ends_its_range_without_an_error():
    found, runs = watched(highest=1e12, updates=200)
    [records] = runs.values()
    [end] = [record for record in records if isinstance(record, RunEnded)]
    assert end.outcome is Outcome.NOT_FINITE
    assert LARGEST / 4 < found.learning_rates[4] < LARGEST


@parametrize_few("protocol", ["k_sync", "k_batch_async", "backup", "pull", "k_batch_sync", "k_async"], keep=1)
def test_the_rate_is_one_within_an_update_and_rises_from_update_to_update(protocol):
    _, runs = watched(protocol=protocol, k=[1, 3], updates=12, highest=0.1)
    assert list(runs) == [f"{protocol}(k=1)  seed 0", f"{protocol}(k=3)  seed 0"]
    tried = Range(0.01, 0.1, 12)
    for records in runs.values():
        rates = [record.learning_rate for record in records if isinstance(record, UpdateMade)]
        assert rates == pytest.approx([*tried.rates, 0.1])


@pytest.mark.slow
def test_batch_protocols_may_have_more_gradients_than_workers():
    assert list(find(protocol="k_batch_sync", k=6, updates=20).learning_rates) == [6]


CHANGES = {
    "another rate of its own": {"optimizer": sgd(lr=0.003)},
    "a scheduler": {"scheduler": partial(StepLR, step_size=1), "schedule_unit": "epoch"},
    "a schedule": {"schedule": pl.plans.LinearSchedule()},
    "the proportional rule": {"lr_rule": "proportional", "lr_is": "per_worker"},
}


@pytest.fixture(scope="module")
def plain():
    return find(line(batch_size=16), k=[2], updates=30).knees[0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_schedule_of_the_job_is_ignored(changes, plain):
    found = find(line(batch_size=16, **changes), k=[2], updates=30).knees[0]
    assert found.losses == pytest.approx(plain.losses, rel=1e-9)
    assert found.learning_rate == plain.learning_rate


@pytest.mark.slow
def test_groups_of_parameters_keep_the_ratio_of_their_rates():
    def grouped(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others, "lr": 0.1}])

    def by_hand(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": others, "lr": 0.5}])

    curves = [find(tiny_job(optimizer=make), k=[2], updates=20).knees[0].losses for make in (grouped, by_hand, sgd())]
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)
    assert curves[0] != pytest.approx(curves[2], rel=1e-9)


@pytest.mark.slow
def test_optimizers_other_than_sgd_have_a_knee():
    found = find(line(optimizer=partial(torch.optim.Adam, lr=1e-3)), updates=60).learning_rates[4]
    assert 0.01 < found < 10


@pytest.mark.slow
def test_the_curve_is_the_mean_over_the_seeds():
    def losses(seed, runs):
        return find(line(batch_size=2), seed=seed, runs=runs, highest=0.1, updates=20)

    both, first, second = losses(5, 2), losses(5, 1), losses(6, 1)
    assert both.seeds == (5, 6)
    for knee in (both, first, second):
        assert knee.knees[0].rates == both.knees[0].rates
    last = [found.knees[0].losses[-1] for found in (first, both, second)]
    assert min(last) < last[1] < max(last)


def test_nothing_is_evaluated():
    _, runs = watched(job=line(eval_data=line().data), updates=10)
    assert not any(isinstance(record, VersionEvaluated) for records in runs.values() for record in records)


def test_the_job_is_not_modified():
    job = line(scheduler=partial(StepLR, step_size=1))
    find(job, updates=10)
    assert job.scheduler.func is StepLR


@pytest.mark.slow
def test_json_names_the_job():
    found = find(k=[1, 4], updates=20)
    read = json.loads(found.to_json())
    assert [knee["k"] for knee in read["knees"]] == [1, 4]
    assert (read["job"], read["protocol"], read["cluster"], read["seeds"]) == ("line", "k_sync", found.cluster, [0])
    assert len(read["knees"][0]["rates"]) == len(read["knees"][0]["losses"]) == 20
    assert [knee["learning_rate"] for knee in read["knees"]] == list(found.learning_rates.values())


# --- what is asked for wrongly ----------------------------------------------------------------------------

WRONG = [
    ({"k": []}, r"k=\[\], expected a quorum or several different ones, for example k=\[1, 4, 8\]"),
    ({"k": [2, 2]}, r"k=\[2, 2\], expected a quorum or several different ones"),
    ({"k": [0]}, r"k_sync\(k=0\): quorum k = 0, expected a whole number >= 1"),
    ({"k": [1.5]}, r"k\[0\]=1.5, expected a whole number"),
    ({"k": [1, 5]}, r"k_sync\(k=5\): waits for k = 5 gradients of 4 workers .*; give k <= 4"),
    ({"lowest": 1.0, "highest": 0.5}, "lowest=1.0 and highest=0.5; expected rising rates"),
    ({"updates": 9}, r"updates=9 is not a whole number in \[10, inf\)"),
    ({"runs": 0}, r"runs=0 is not a whole number in \[1, inf\)"),
    ({"seed": -1}, r"seed=-1 is not a whole number in \[0, inf\)"),
    ({"protocol": "k_sink"}, "'k_sink' is not known; did you mean 'k_sync'"),
    ({"protocol": "bsp"}, "'bsp' has no quorum k; give one of backup, k_sync, pull"),
    ({"protocol": "asp"}, "'asp' has no quorum k"),
    ({"protocol": "dbw"}, "'dbw' has no quorum k"),
    ({"protocol": "k_sync(k=4)"}, r"'k_sync\(k=4\)' has knobs; give the name alone, 'k_sync', and k"),
    ({"protocol": "bsp@50% >> asp"}, "cannot read"),
    ({"protocol": pl.k_sync}, "expected text; call it"),
    ({"job": "digits"}, "job='digits', expected a pl.Job"),
]


@pytest.mark.parametrize(("asked", "words"), WRONG, ids=[words for _, words in WRONG])
def test_invalid_arguments_are_refused_before_the_first_run(asked, words):
    def watch(title, stop):
        raise AssertionError(f"{title} has run")

    with pytest.raises(pl.UsageError, match=words):
        find(watch=watch, **asked)


def test_a_rate_of_zero_cannot_be_scaled():
    with pytest.raises(pl.UsageError, match="the learning rate of the job's optimizer is 0; give one > 0"):
        find(line(optimizer=sgd(lr=0.0)))


def test_a_range_with_a_too_large_lowest_rate_is_an_error():
    with pytest.raises(pl.RunError, match=r"k_sync\(k=4\): the loss never fell below .* give a smaller lowest rate"):
        find(lowest=10.0, updates=10)


def test_a_range_test_without_live_workers_is_an_error():
    cluster = pl.Cluster(4, faults=[pl.Fault(worker=0, draw=3)])
    with pytest.raises(pl.RunError, match=r"k_sync\(k=4\), seed 0: an update had fewer than 4 gradients"):
        find(cluster=cluster, updates=10)
    all_lost = pl.Cluster(4, faults=[pl.Fault(worker=worker, draw=3) for worker in range(4)])
    with pytest.raises(pl.RunError, match=r"k_sync\(k=4\), seed 0: .*worker"):
        find(cluster=all_lost, updates=10)


# --- the command line -------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch, capsys, tmp_path):
    """Run `paceline lr-range-test digits` in an empty folder; return its status and what it says."""
    monkeypatch.chdir(tmp_path)
    asked = ["--cluster", CLUSTER, "--updates", "20", "--runs", "1"]

    def run(*arguments, protocol="k_sync", k="1,4"):
        words = ["paceline", "lr-range-test", "digits", "--protocol", protocol, "--k", k, *asked, *arguments]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code or 0, said.out, said.err

    return run


@pytest.mark.slow
def test_the_command_prints_a_table_and_the_next_command(program):
    status, out, err = program("--highest", "30")
    assert status == 0, err
    assert all(len(row) <= 80 for row in out.splitlines())
    rates = {int(row.split()[0]): float(row.split()[1]) for row in out.splitlines() if row[:4].strip().isdigit()}
    found = pl.lr_range_test(
        pl.jobs.digits(), protocol="k_sync", k=[1, 4], cluster=CLUSTER, updates=20, runs=1, highest=30
    ).learning_rates
    assert rates == pytest.approx(found, rel=0.01)
    assert "digits(lr=" in out
    assert "k_sync(k=4)  seed 0" in err


def test_the_command_reports_a_range_that_is_too_short(program):
    _, out, _ = program("--highest", "0.01", k="1")
    assert "k = 1: the loss did not rise up to the rate 0.01, so the knee may lie higher" in out


def test_the_command_writes_json(program, tmp_path):
    status, out, _ = program("--format", "json", "--out", "rates.json")
    assert (status, out) == (0, (tmp_path / "rates.json").read_text())
    assert [knee["k"] for knee in json.loads(out)["knees"]] == [1, 4]
    status, _, err = program("--out", "rates.json")
    assert (status, err) == (2, "paceline: rates.json exists already; give another file, or --overwrite\n")
    assert program("--out", "rates.json", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": "1,x"}, "paceline: --k '1,x', expected whole numbers, for example --k 1,4,8,16\n"),
        ({"k": ""}, "paceline: an argument is empty"),
        ({"protocol": "bsp"}, "paceline: 'bsp' has no quorum k"),
    ],
)
def test_the_command_refuses_invalid_options_in_one_line(program, options, words):
    status, _, err = program(**options)
    assert status == 2
    assert err.startswith(words)
    assert err.count("\n") == 1


def test_a_missing_folder_is_refused_before_the_search(program):
    status, out, err = program("--out", "missing/rates.json")
    assert (status, out) == (2, "")
    assert err == "paceline: there is no folder missing for rates.json; make it, or give another file\n"


def test_a_run_that_crashes_is_named():
    class Breaks:
        def __call__(self, output, target):
            raise ValueError("my mistake")

    with pytest.raises(ValueError, match="my mistake") as failure:
        pl.lr_range_test(tiny_job(loss=Breaks()), protocol="k_sync", k=2, cluster="2*exp(mean=1)", updates=20, seed=3)
    assert "in the run of k_sync(k=2), seed 3" in failure.value.__notes__
