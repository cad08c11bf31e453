from itertools import pairwise

import numpy as np
import pytest

from paceline.report.curves import GRID, MOST_POINTS, band, groups, smooth_loss
from paceline.report.reading import read_run
from report.runs import begun, train_run, update, write_run

nan, inf = float("nan"), float("inf")


def run_of_losses(path, losses, k, **changes):
    workload = np.cumsum(k)
    records = [
        update(i + 1, float(i + 1), k=int(k[i]), loss=loss, workload=int(workload[i])) for i, loss in enumerate(losses)
    ]
    return read_run(write_run(path, [begun(), *records], **changes), "")


@pytest.mark.parametrize("workers", [2, 12, 40])
def test_the_loss_is_the_mean_of_as_many_gradients_as_the_stop_looks_at(tmp_path, workers):
    rng = np.random.default_rng(workers)
    k = np.full(30, 2)
    losses = rng.normal(size=30)
    run = run_of_losses(tmp_path / "run", losses.tolist(), k, workers=workers)
    of_gradients = np.repeat(losses, k)
    window = max(workers, 10)
    expected = [of_gradients[max(0, 2 * i - window) : 2 * i].mean() for i in range(1, 31)]
    assert smooth_loss(run) == pytest.approx(expected)


def test_one_update_of_more_gradients_than_the_window_is_its_own_mean(tmp_path):
    run = run_of_losses(tmp_path / "run", [3.0, 1.0, 2.0], [50, 50, 50])
    assert smooth_loss(run).tolist() == [3.0, 1.0, 2.0]


def test_losses_that_are_not_finite_are_left_out_of_the_mean(tmp_path):
    run = run_of_losses(tmp_path / "run", [nan, 2.0, inf, 4.0], [2, 2, 2, 2])
    assert smooth_loss(run) == pytest.approx([nan, 2.0, 2.0, 3.0], nan_ok=True)


def test_a_single_short_line_is_drawn_point_by_point():
    x, y = np.arange(5.0), np.array([3.0, nan, 1.0, inf, 2.0])
    line = band([(x, y)])
    assert line.x.tolist() == [0.0, 2.0, 4.0]
    assert line.mean.tolist() == line.low.tolist() == line.high.tolist() == [3.0, 1.0, 2.0]


def test_a_band_goes_from_the_smallest_to_the_largest_as_far_as_all_lines_go():
    lines = [(np.array([1.0, 5.0]), np.array([1.0, 5.0])), (np.array([0.0, 4.0]), np.array([10.0, 6.0]))]
    line = band(lines)
    assert (line.x[0], line.x[-1], len(line.x)) == (1.0, 4.0, GRID)
    straight = np.array([line.x, 10 - line.x])
    assert line.mean == pytest.approx(straight.mean(axis=0))
    assert line.low == pytest.approx(straight.min(axis=0))
    assert line.high == pytest.approx(straight.max(axis=0))


def test_dense_points_become_means_that_keep_the_area():
    rng = np.random.default_rng(1)
    x = np.cumsum(rng.uniform(0.1, 2.0, size=20 * MOST_POINTS))
    y = rng.normal(size=len(x))
    line = band([(x, y)])
    edges = np.concatenate([line.x[:1], (line.x[1:] + line.x[:-1]) / 2, line.x[-1:]])
    area = sum(value * (b - a) for value, (a, b) in zip(line.mean, pairwise(edges), strict=True))
    assert area == pytest.approx((y[1:] * np.diff(x)).sum())
    assert len(line.x) == GRID


def test_a_constant_stays_constant_however_dense():
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
def test_there_is_no_line_where_nothing_is_known_or_in_common(lines):
    assert band(lines) is None


def test_runs_of_one_protocol_make_one_group(tmp_path):
    paths = [("bsp", 0), ("bsp", 1), ("asp", 0)]
    runs = [read_run(train_run(tmp_path / f"{p}-{s}", p, s, updates=20), f"{p} {s}") for p, s in paths]
    assert [(group.label, len(group.runs)) for group in groups(runs)] == [("bsp", 2), ("asp", 1)]
    lines = groups(runs)[0].lines
    assert set(lines) == {"time", "updates", "workload"}
    assert set(lines["time"]) == {"loss", "accuracy", "k"}
    assert lines["workload"]["k"].x[-1] == 80
    assert lines["updates"]["k"].x[-1] == 20
    assert lines["time"]["k"].x[-1] == min(run.end_s for run in runs[:2])


def test_one_protocol_on_two_clusters_makes_two_groups_with_names_of_their_own(tmp_path):
    runs = [run_of_losses(tmp_path / name, [1.0], [2], cluster=name) for name in ("fast", "slow")]
    assert [group.label for group in groups(runs)] == ["bsp (fast)", "bsp (slow)"]
