"""The table of a comparison: averages, missed targets, intervals, JSON."""

import json
import re
from pathlib import Path

import pytest

import paceline as pl
from paceline.experiments.comparison_row import ComparisonRow
from paceline.experiments.runner.ending import Crash
from paceline.recording.run_stats import RunStats


def figures(time_s, outcome=pl.results.Outcome.LOSS, **others):
    return RunStats(stopped_by=outcome, time_s=time_s, worker_s=time_s * 4, **others)


def row_of(protocol, runs, crashes=(), unfinished=()):
    return ComparisonRow(protocol=protocol, runs=runs, crashes=dict(crashes), unfinished=unfinished)


def comparison_of(rows, **options):
    return pl.results.Comparison(
        rows=[row_of(*row) for row in rows], stop=pl.Stop(loss=0.2, seconds=60), folder=Path("runs"), **options
    )


MISSED = figures(60.0, pl.results.Outcome.SECONDS)
ROWS = [
    ("bsp", {0: figures(20.0), 1: figures(30.0), 2: figures(40.0)}),
    ("asp", {0: figures(12.0), 1: MISSED, 2: figures(13.0)}),
    ("pull(k=2)", {0: figures(10.0), 1: figures(15.0), 2: figures(20.0)}),
    ("backup(k=2)", {0: MISSED, 1: MISSED, 2: MISSED}),
]


def test_missed_targets_are_listed_and_left_out_of_averages():
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


def test_json_has_every_run_and_null_for_missed_targets():
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


def test_missing_runs_are_left_out_of_averages():
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
    printed = " ".join(comparison.text().split())
    assert "fast against bsp, 95 % intervals over 3 paired seeds: speed-up 2 to 2; training loss +0.00752" in printed
    assert "like against bsp, 95 % intervals over 3 paired seeds: speed-up: no significant difference (0.6" in printed
    row = json.loads(comparison.to_json())["rows"][1]["against_first"]
    assert row["speed-up"]["is_seen"] is True
    assert row["training loss"]["pairs"] == 3


def test_one_seed_gives_no_interval():
    comparison = comparison_of([("bsp", {0: figures(2.0, loss=0.1)}), ("asp", {0: figures(1.0, loss=0.2)})])
    assert comparison.against_first(comparison.rows[1]) == []
    assert "95 %" not in comparison.text()


def test_times_are_compared_only_if_every_run_of_both_reaches_the_target():
    runs = {0: figures(12.0, loss=0.2), 1: figures(60.0, pl.results.Outcome.SECONDS, loss=0.3)}
    comparison = comparison_of([("bsp", {0: figures(20.0, loss=0.2), 1: figures(30.0, loss=0.2)}), ("asp", runs)])
    assert [each.name for each in comparison.against_first(comparison.rows[1])] == ["training loss"]


def test_the_table_fits_80_columns():
    large = figures(123456.7, updates=10_000_000, used=160_000_000, dropped=99_999_999, interrupted=12_345_678)
    name = "bsp@6.25% >> k_batch_async(k=123) >> ringmaster(r=12, stops=true)"
    comparison = comparison_of([(name, {0: large, 1: figures(234567.8), 2: MISSED})], price=2.5)
    assert max(map(len, comparison.text().splitlines())) <= 80
    assert "2 of 3: 179012 (123457 to 234568)" in comparison.text()
