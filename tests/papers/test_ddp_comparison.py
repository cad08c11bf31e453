"""The comparison with DDP: patterns, times of parameters that do not depend on them, outcomes, and a whole trial."""

from collections import defaultdict
from dataclasses import replace
from math import inf, isclose
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

import paceline as pl
from paceline.core.records import WorkerJoined, WorkerLost
from paceline.experiments.advise.evidence import EVIDENCE
from papers.ddp import outcomes as outcomes_module
from papers.ddp import quick, run, settings, table, training
from papers.ddp.goals import goals
from papers.ddp.jobs import make_job
from papers.ddp.outcomes import Outcome, all_lines, loss_difference, outcomes, speed_up
from papers.ddp.patterns import GRADIENT_S, PATTERNS
from papers.ddp.settings import AUTO, BALANCED, CONTENDERS, DDP, GRID, JOBS, QUEUE, WITHOUT_SLOW, Comparison
from papers.ddp.times import cluster_of, death_of, seconds_at, slow_share_of
from papers.ddp.training import Timed, Untimed, task_of
from papers.store import Store, figure_store
from papers.tasks import Where
from selections import parametrize_few

HERE = Where(Path())


@pytest.fixture(scope="module")
def imported():
    """One update, whose imports take seconds."""
    pl.train(make_job("digits", 8, 1.0, "noise", Path()), protocol="auto", cluster="2*exp(mean=1)", stop="updates=1")


@pytest.fixture
def tiny(imported, monkeypatch):
    """Digits with eight updates of DDP."""
    monkeypatch.setitem(JOBS, "digits", replace(JOBS["digits"], gradients={8: 64}))


def seconds_of(cluster, worker, draws=400):
    trips = cluster.round_trips(seed=0)
    now, taken = 0.0, []
    for draw in range(1, draws + 1):
        taken.append(trips.times(worker, draw, now).compute_s)
        now += taken[-1]
    return np.array(taken)


# --- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_removing_the_slow_worker_does_not_change_the_others(pattern):
    whole, rest = (PATTERNS[pattern].cluster(8, without_slow=without) for without in (False, True))
    assert (whole.n, rest.n) == (8, 7)
    for worker in range(7):
        assert seconds_of(whole, worker, 50).tolist() == seconds_of(rest, worker, 50).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "factors"),
    [
        ("half", [1, 1, 1, 2]),
        ("none", [1] * 4),
        ("quarter", [1, 1, 1, 4]),
        ("ladder", [1, 9 / 7, 9 / 5, 3]),
        ("transient", [1.2] * 4),
    ],
)
def test_mean_seconds_of_each_worker(pattern, factors):
    cluster = PATTERNS[pattern].cluster(4)
    means = [seconds_of(cluster, worker, 20_000).mean() for worker in range(4)]
    assert means == pytest.approx([GRADIENT_S * factor for factor in factors], rel=0.03)


def test_a_twentieth_of_the_gradients_is_slow_in_the_transient_pattern():
    values_s = np.array(PATTERNS["transient"].timing.values_s)
    assert (values_s > 3 * GRADIENT_S).mean() == 0.05
    assert values_s.mean() == pytest.approx(1.2 * GRADIENT_S, rel=1e-3)


def test_one_worker_after_the_other_is_slow_in_the_rotating_pattern():
    cluster = PATTERNS["rotating"].cluster(4)
    for at_s in np.arange(0.5, 30, 2.0):
        factors = [cluster.slowness_of(worker, 0).duration_s(0.01, at_s) / 0.01 for worker in range(4)]
        slow = int(at_s // 2) % 4
        assert factors == pytest.approx([3.0 if worker == slow else 1.0 for worker in range(4)])


@pytest.mark.slow
def test_the_killed_worker_comes_back(tiny):
    cluster = cluster_of("digits", 8, PATTERNS["death"], CONTENDERS["k_sync(k=n-1)"], seed=0)
    job = make_job("digits", 8, 1.0, "constant", Path())
    result = pl.train(job, protocol="k_sync(k=7)", cluster=cluster, stop="gradients=64", seed=0, progress=False)
    lost, joined = result.history.of(WorkerLost), result.history.of(WorkerJoined)
    assert [each.worker for each in lost] == [each.worker for each in joined] == [7]
    death = death_of("digits", 8, seed=0)
    assert joined[0].now_s - lost[0].now_s == pytest.approx(death.ddp_s / 30)
    assert lost[0].now_s == pytest.approx(death.ddp_s / 2, rel=0.2)


# --- times and parameters --------------------------------------------------------------------------------------------


@parametrize_few("name", [DDP, WITHOUT_SLOW, "torchft", "bsp", "dc_s3gd", "local SGD (H=4)"], keep=1)
def test_times_that_are_simulated_apart_are_those_of_a_run(name, tiny):
    contender, pattern = CONTENDERS[name], PATTERNS["rotating"]
    cluster = cluster_of("digits", 8, pattern, contender, seed=3)
    job = make_job("digits", 8, 1.0, "constant", Path())
    payload = 4 * sum(parameter.numel() for parameter in job.model().parameters())
    assert payload == JOBS["digits"].payload_bytes
    stop = pl.Stop(updates=8)
    result = pl.train(job, protocol=contender.plan(cluster.n), cluster=cluster, stop=stop, seed=3, progress=False)
    assert isclose(
        seconds_at("digits", 8, pattern, name, 8, seed=3), result.time_s, rel_tol=1e-6
    )  # a sum also has a loss


@pytest.mark.slow
@pytest.mark.parametrize("name", [DDP, "bsp", "dc_s3gd"])
def test_parameters_of_these_do_not_depend_on_times(name, tiny):
    untimed = Untimed("digits", 8, name, 0, 1.0).carry_out(HERE)["evaluated"]
    timed = Timed("digits", 8, "rotating", name, 0, 1.0).carry_out(HERE)["evaluated"]
    assert [each["updates"] for each in untimed] == [each["updates"] for each in timed] == list(range(1, 9))
    assert [each["loss"] for each in untimed] == pytest.approx([each["loss"] for each in timed], abs=1e-4)


@pytest.mark.slow
def test_post_local_sgd_is_ddp_until_half_of_the_workload(tiny, monkeypatch):
    train = pl.train
    names = (DDP, "post-local SGD (H=4)")
    ddp, post = (Untimed("digits", 8, name, 0, 1.0).carry_out(HERE)["evaluated"] for name in names)
    assert post[:4] == ddp[:4]
    assert (post[-1]["updates"], post[-1]["gradients"]) == (8, 64)
    assert post[-1]["loss"] != ddp[-1]["loss"]
    seeds = []
    monkeypatch.setattr(
        training.pl, "train", lambda job, *, seed, **options: seeds.append(seed) or train(job, seed=seed, **options)
    )
    Untimed("digits", 8, "post-local SGD (H=4)", 3, 1.0).carry_out(HERE)
    assert seeds == [3, 1_003]  # other minibatches in the second part
    for pattern in ("none", "quarter"):
        seconds = [seconds_at("digits", 8, PATTERNS[pattern], name, 4, 0) for name in names]
        assert seconds[0] == seconds[1]


@pytest.mark.slow
def test_ddp_repeats_and_waits_when_a_worker_dies():
    none, death = (seconds_at("mnist", 8, PATTERNS[pattern], DDP, 240, 0) for pattern in ("none", "death"))
    assert death == pytest.approx(none * (1 + 8 / 60))
    before = [seconds_at("mnist", 8, PATTERNS[pattern], DDP, 120, 0) for pattern in ("none", "death")]
    assert before[0] == before[1]
    others = [seconds_at("mnist", 8, PATTERNS[pattern], WITHOUT_SLOW, 240, 0) for pattern in ("none", "death")]
    assert others[0] == others[1]


@pytest.mark.slow
def test_torchft_needs_more_time_for_a_step_and_goes_on_when_a_worker_dies(tiny):
    ddp_s, torchft_s = (seconds_at("mnist", 8, PATTERNS["none"], name, 100, 0) for name in (DDP, "torchft"))
    assert torchft_s - ddp_s == pytest.approx(100 * settings.TORCHFT_STEP_S)
    death = Comparison("digits", 8, "death", ("torchft",), 1)
    task = task_of(death, "torchft", 0, 1.0)
    assert isinstance(task, Timed)
    evaluated = task.carry_out(HERE)["evaluated"]
    assert {each["gradients"] % 8 for each in evaluated} > {0}  # some updates have seven gradients


@pytest.mark.slow
def test_every_contender_runs_on_every_cluster():
    for comparison in GRID:
        for name in comparison.contenders:
            contender, pattern = CONTENDERS[name], PATTERNS[comparison.pattern]
            cluster = cluster_of(comparison.job, comparison.n, pattern, contender, seed=0)
            if name not in ("auto", "dbw", "sync_switch"):  # these need losses, or the length of the run
                pl.simulate(contender.plan(cluster.n), cluster, updates=3)
            task = task_of(comparison, name, 0, 0.1)
            assert isinstance(task, Timed) == contender.is_timed(pattern.dies)


# --- outcomes --------------------------------------------------------------------------------------------------------

HALF = Comparison("mnist", 8, "half", (DDP, WITHOUT_SLOW, "k_sync(k=n-1)"), 2)


def line(name, seed, losses, seconds=None, **more):
    asked = {"job": "mnist", "n": 8, "series": name, "seed": seed, "lr": JOBS["mnist"].lr[8]}
    if seconds is not None:
        asked["pattern"] = "half"
    evaluated = [
        {"updates": 10 * i, "gradients": 80 * i, "loss": loss, **({"time_s": seconds[i - 1]} if seconds else {})}
        for i, loss in enumerate(losses, 1)
    ]
    return {"asked": asked, "evaluated": evaluated, **more}


@pytest.mark.slow
def test_the_target_is_the_final_loss_of_ddp_with_the_same_seed_plus_the_margin():
    lines = [
        line(DDP, 0, [0.5, 0.2]),
        line(DDP, 1, [0.5, 0.3]),
        line("k_sync(k=n-1)", 0, [0.31, 0.22, 0.1], [1.0, 2.0, 3.0], slow_share=0.25),
        line("k_sync(k=n-1)", 1, [0.31, 0.22, 0.1], [1.0, 2.5, 3.0], slow_share=0.25),
    ]
    found = outcomes(HALF, lines)
    ours = found["k_sync(k=n-1)"]
    assert [ours[seed].target_s for seed in (0, 1)] == [2.0, 1.0]
    assert [ours[seed].run_s for seed in (0, 1)] == [3.0, 3.0]
    ddp_s = [seconds_at("mnist", 8, PATTERNS["half"], DDP, 20, seed) for seed in (0, 1)]
    assert [found[DDP][seed].target_s for seed in (0, 1)] == ddp_s
    faster = speed_up(ours, found[DDP])
    assert faster.estimate == pytest.approx((ddp_s[0] / 2.0 * ddp_s[1] / 1.0) ** 0.5)
    assert loss_difference(ours, found[DDP]).estimate == pytest.approx(-0.15)
    assert (found[DDP][0].slow_share, ours[0].slow_share) == (1 / 8, 0.25)
    assert found[WITHOUT_SLOW] == {}
    without = outcomes(HALF, [*lines, line(WITHOUT_SLOW, 0, [0.2])])[WITHOUT_SLOW][0]
    assert (without.slow_share, without.ranks) == (0.0, 7)


def test_a_run_that_misses_the_target_has_no_speed_up_and_is_counted():
    lines = [line(DDP, seed, [0.2]) for seed in (0, 1)]
    lines += [line("k_sync(k=n-1)", seed, [loss], [1.0], slow_share=0.0) for seed, loss in ((0, 0.2), (1, 0.4))]
    found = outcomes(HALF, lines)
    assert found["k_sync(k=n-1)"][1].target_s == inf
    assert speed_up(found["k_sync(k=n-1)"], found[DDP]) is None
    shown = list(table.table(found))[-1]
    assert "1.0 (1 of 2 not reached)" in shown
    assert shown.startswith("| k_sync(k=n-1) | +0.100 (")
    found["k_sync(k=n-1)"].pop(1)
    assert list(table.table(found))[-1].startswith("| k_sync(k=n-1) (1 seed) | -")


def test_runs_at_another_rate_or_pattern_are_left_out():
    lines = [line(DDP, 0, [0.2]), line("k_sync(k=n-1)", 0, [0.2], [1.0], slow_share=0.0)]
    other_rate = [replaced(each, lr=9.0) for each in lines]
    other_pattern = [lines[0], replaced(lines[1], pattern="none")]
    assert outcomes(HALF, other_rate)[DDP] == {}
    assert outcomes(HALF, other_pattern)["k_sync(k=n-1)"] == {}


def runs_of(times, losses=(0.2, 0.2)):
    """Return the outcomes of two seeds, one of which is 10 % slower than the other."""
    return {seed: Outcome(losses[seed], 0.9, 9.0, times * (1 + seed / 10), 8, 0.1) for seed in (0, 1)}


def test_each_goal_is_measured_where_it_is_missed_most():
    even = {DDP: runs_of(1.0), WITHOUT_SLOW: runs_of(1.0)}
    found = {
        HALF._replace(pattern="none"): {**even, AUTO: runs_of(1.0)},
        HALF: {**even, WITHOUT_SLOW: runs_of(0.5), AUTO: runs_of(0.8)},  # slower than DDP without the slow worker
        HALF._replace(pattern="rotating"): {**even, AUTO: runs_of(0.5)},
        HALF._replace(pattern="ladder"): {**even, AUTO: runs_of(0.9)},
        HALF._replace(pattern="death"): {**even, AUTO: runs_of(1.0, losses=(0.2, 0.3))},
    }
    healthy, everywhere, faster, loss = goals(found)
    assert (healthy.measured[:4], healthy.is_reached) == ("1.00", True)
    assert (everywhere.measured[:4], everywhere.is_reached) == ("1.60", False)
    assert everywhere.measured.endswith("half, MNIST CNN, 8 workers")
    assert (faster.measured[:4], faster.is_reached) == ("1.11", False)
    assert faster.measured.endswith("ladder, MNIST CNN, 8 workers")
    assert (loss.measured[:6], loss.is_reached) == ("+0.050", False)
    without = {comparison: runs for comparison, runs in found.items() if comparison.pattern in ("none", "rotating")}
    assert [goal.is_reached for goal in goals(without)] == [True, True, True, True]


def test_a_goal_is_missed_where_auto_does_not_reach_the_target():
    runs = {DDP: runs_of(1.0), WITHOUT_SLOW: runs_of(1.0), AUTO: runs_of(inf)}
    healthy, everywhere, _ = goals({HALF._replace(pattern="none"): runs})
    assert not healthy.is_reached
    assert not everywhere.is_reached
    assert healthy.measured.startswith("2 of 2 not reached: none")
    _, faster, _ = goals({HALF._replace(pattern="rotating"): runs})
    assert (faster.measured[:18], faster.is_reached) == ("2 of 2 not reached", False)


def replaced(line, **asked):
    return {**line, "asked": {**line["asked"], **asked}}


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trial_shows_one_pattern(tiny, monkeypatch, capsys):
    monkeypatch.setattr(quick, "TRIAL_SEEDS", 2)
    monkeypatch.setattr(quick, "TRIED", (DDP, WITHOUT_SLOW, AUTO))
    run.main(["--pattern", "half", "--quick"])
    shown = capsys.readouterr().out
    assert "one worker has half the speed" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "1.00 (1.00 to 1.00)" in rows["DDP"]
    assert {"DDP without the slow", "auto"} <= rows.keys()


def test_a_trial_needs_a_pattern(capsys):
    with pytest.raises(SystemExit):
        run.main(["--quick"])
    assert "--pattern rotating --quick" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_are_saved_and_shown_on_the_page_of_their_pattern(tiny, monkeypatch, tmp_path):
    trial = Comparison("digits", 8, "half", (DDP, WITHOUT_SLOW, AUTO), 2)
    for module in (run, outcomes_module):
        monkeypatch.setattr(module, "GRID", (trial,))
    for _ in range(2):  # the second time nothing is left to run
        run.main(["--figure", "untimed", "--figure", "timed", "--out", str(tmp_path)])
    assert [len(figure_store(figure, tmp_path).lines()) for figure in ("untimed", "timed")] == [4, 2]
    page = "# Title\n<!-- results -->\nold\n<!-- end of results -->\nText\n"
    found = list(table.tables("half", all_lines(tmp_path)))
    shown = table.with_tables(page, found)
    assert shown == table.with_tables(shown, found)
    before, *rows, after = [row.split(" | ")[0] for row in shown.splitlines() if row.startswith(("|", "#", "Text"))]
    assert (before, after) == ("# Title", "Text")
    assert rows == [
        "## digits, 8 workers, 2 seeds",
        "| contender",
        "| ---",
        "| DDP",
        "| DDP without the slow worker",
        "| auto",
    ]
    assert "old" not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern", "faster"),
    [
        *((BALANCED, "half", 1.65), (BALANCED, "none", 1.0), (BALANCED, "ladder", 1.8)),
        *((QUEUE, "half", 1.65), (QUEUE, "none", 1.0), (QUEUE, "rotating", 2.05)),
    ],
)
def test_balanced_has_times_and_shares_of_its_own_and_the_updates_of_ddp(name, pattern, faster):
    ours, ddp = (seconds_at("mnist", 8, PATTERNS[pattern], each, 240, seed=0) for each in (name, DDP))
    assert ddp / ours == pytest.approx(faster, rel=0.05)
    assert slow_share_of("mnist", 8, PATTERNS["none"], name, 0) == pytest.approx(1 / 8, rel=0.05)
    assert slow_share_of("mnist", 8, PATTERNS["half"], name, 0) < 0.08
    own = {task.pattern for task in run.tasks("timed", None, f"/{name}$")}
    assert own == {"death"}
    assert run.tasks("untimed", None, f"/{name}$") == []


def test_the_page_says_what_the_advice_says():
    index = (table.PAGES / "index.md").read_text()
    for pattern, evidence in EVIDENCE.items():
        assert f"| [{evidence.seen}]({pattern}.md) | {evidence.typed} |" in index


def test_rates_are_searched_with_seeds_of_their_own():
    tasks = run.tasks("rates", None, "mnist/8")
    assert {task.seed for task in tasks} == set(settings.TUNING_SEEDS)
    assert {task.lr for task in tasks} == set(JOBS["mnist"].rates)
    assert max(comparison.seeds for comparison in GRID) < min(settings.TUNING_SEEDS)
    assert all(about.lr[n] in about.rates for about in JOBS.values() for n in about.gradients)


def test_the_rate_of_a_finished_search_is_its_best_one_and_has_neighbours():
    losses = defaultdict(list)
    for line in Store(settings.RESULTS / "rates.jsonl").lines():
        asked = line["asked"]
        losses[asked["job"], asked["n"], asked["lr"]].append(line["evaluated"][-1]["loss"])
    finished = 0
    for name, about in JOBS.items():
        for n, lr in about.lr.items():
            found = {rate: losses[name, n, rate] for rate in about.rates}
            if all(len(each) == about.tunings for each in found.values()):
                finished += 1
                assert lr == min(found, key=lambda rate: fmean(found[rate])), name
                assert min(about.rates) < lr < max(about.rates), name
    assert finished >= 3
