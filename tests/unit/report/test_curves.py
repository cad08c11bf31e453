from itertools import pairwise

import numpy as np
import pytest

from paceline.report.curves import GRID, MOST_POINTS, band, groups, smooth_loss
from paceline.report.run_data import read_run
from written_runs import arrival, begun, train_run, update, write_run

nan, inf = float("nan"), float("inf")


def run_of_losses(path, losses, k, **changes):
    """Updates of k gradients each, which have these losses in the order of their arrival."""
    records, draw = [begun(1)], 0
    for version, count in enumerate(k, start=1):
        for _ in range(count):
            records.append(arrival(0, draw + 1, draw, draw + 1.0, loss=losses[draw]))
            draw += 1
        records.append(update(version, float(draw), k=count, workload=draw))
    return read_run(write_run(path, records, **changes), "")


@pytest.mark.parametrize("workers", [2, 12, 40])
def test_the_loss_is_the_mean_over_the_window_of_the_stop(tmp_path, workers):
    rng = np.random.default_rng(workers)
    k = rng.integers(1, 5, size=30).tolist()
    losses = rng.normal(size=sum(k)).tolist()
    run = run_of_losses(tmp_path / "run", losses, k, workers=workers)
    window = max(workers, 10)
    expected = [np.mean(losses[max(0, last - window) : last]) for last in np.cumsum(k)]
    assert smooth_loss(run) == pytest.approx(expected)


@pytest.mark.slow
def test_the_final_loss_is_the_one_that_reached_the_target(tmp_path):
    saved = train_run(tmp_path / "run", "bsp", stop="loss=1.0")
    run = read_run(saved, "")
    assert run.stats.reason.startswith(f"mean loss {smooth_loss(run)[-1]:.6g} reached")


def test_losses_that_are_not_finite_are_left_out_of_the_mean(tmp_path):
    run = run_of_losses(tmp_path / "run", [nan, 2.0, inf, 4.0], [1, 1, 1, 1])
    assert smooth_loss(run) == pytest.approx([nan, 2.0, 2.0, 3.0], nan_ok=True)


def test_a_single_short_line_is_drawn_point_by_point():
    x, y = np.arange(5.0), np.array([3.0, nan, 1.0, inf, 2.0])
    line = band([(x, y)])
    assert line.x.tolist() == [0.0, 2.0, 4.0]
    assert line.mean.tolist() == line.low.tolist() == line.high.tolist() == [3.0, 1.0, 2.0]


def test_a_band_spans_minimum_to_maximum_over_the_common_range():
    lines = [(np.array([1.0, 5.0]), np.array([1.0, 5.0])), (np.array([0.0, 4.0]), np.array([10.0, 6.0]))]
    line = band(lines)
    assert (line.x[0], line.x[-1], len(line.x)) == (1.0, 4.0, GRID)
    straight = np.array([line.x, 10 - line.x])
    assert line.mean == pytest.approx(straight.mean(axis=0))
    assert line.low == pytest.approx(straight.min(axis=0))
    assert line.high == pytest.approx(straight.max(axis=0))


def test_downsampled_points_preserve_the_area():
    rng = np.random.default_rng(1)
    x = np.cumsum(rng.uniform(0.1, 2.0, size=20 * MOST_POINTS))
    y = rng.normal(size=len(x))
    line = band([(x, y)])
    edges = np.concatenate([line.x[:1], (line.x[1:] + line.x[:-1]) / 2, line.x[-1:]])
    area = sum(value * (b - a) for value, (a, b) in zip(line.mean, pairwise(edges), strict=True))
    assert area == pytest.approx((y[1:] * np.diff(x)).sum())
    assert len(line.x) == GRID


def test_downsampling_keeps_a_constant():
    line = band([(np.arange(50_000.0), np.full(50_000, 8.0)), (np.arange(70.0, 90_000.0), np.full(89_930, 8.0))])
    assert line.mean == pytest.approx(np.full(GRID, 8.0))


@pytest.mark.parametrize(
    "lines",
    [
        [(np.zeros(0), np.zeros(0))],
        [(np.arange(3.0), np.full(3, nan))],
        [(np.arange(3.0), np.ones(3)), (np.arange(5.0, 8.0), np.ones(3))],
    ],
)
def test_there_is_no_curve_without_points_or_a_common_range(lines):
    assert band(lines) is None


@pytest.mark.slow
def test_runs_of_one_protocol_make_one_group(tmp_path):
    paths = [("bsp", 0), ("bsp", 1), ("asp", 0)]
    runs = [read_run(train_run(tmp_path / f"{p}-{s}", p, s, updates=20), f"{p} {s}") for p, s in paths]
    assert [(group.label, len(group.runs)) for group in groups(runs)] == [("bsp", 2), ("asp", 1)]
    lines = groups(runs)[0].lines
    assert set(lines) == {"time", "updates", "workload"}
    assert set(lines["time"]) == {"loss", "accuracy", "metric loss", "k"}
    assert lines["workload"]["k"].x[-1] == 80
    assert lines["updates"]["k"].x[-1] == 20
    assert lines["time"]["k"].x[-1] == min(run.end_s for run in runs[:2])


def test_one_protocol_on_two_clusters_makes_two_groups_with_names_of_their_own(tmp_path):
    runs = [run_of_losses(tmp_path / name, [1.0], [1], cluster=name) for name in ("fast", "slow")]
    assert [group.label for group in groups(runs)] == ["bsp on fast", "bsp on slow"]
