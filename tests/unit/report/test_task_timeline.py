from itertools import pairwise

import pytest

import paceline as pl
from paceline.core.records import GradientArrived, UpdateMade, WorkInterrupted
from paceline.report.figures import figure_class
from paceline.report.run_data import read_run
from paceline.report.task_timeline import FRESH, ROW, STALE, STYLES, WAITING, bars_until, draw_tasks
from written_runs import exponential, train_run, two_updates, write_run

USUAL = ["k_sync(k=3)", "asp", "dc_s3gd"]
OTHERS = ["bsp", "k_async(k=2)", "backup(k=3)", "local_sgd(H=3)"]


@pytest.fixture(params=[*USUAL, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)], scope="module")
def saved(request, tmp_path_factory):
    cluster = pl.Cluster(4, pl.timing.Exponential(1.0), speed=[1, 1, 1, 0.3], network=pl.timing.Network(latency_s=0.02))
    return train_run(tmp_path_factory.mktemp("runs") / "run", request.param, updates=12, cluster=cluster)


def spent_s(bars):
    return sum(bar.end_s - bar.start_s for bar in bars)


def test_the_bars_of_a_worker_fill_its_time_without_overlap(saved):
    run = read_run(saved, "")
    for worker in range(run.workers):
        bars = [bar for bar in bars_until(run, run.end_s) if bar.worker == worker]
        assert bars[0].start_s == 0
        assert bars[-1].end_s == run.end_s
        assert all(left.end_s == pytest.approx(right.start_s) for left, right in pairwise(bars))


def test_every_record_of_a_task_has_a_bar_of_its_fate(saved):
    run = read_run(saved, "")
    bars = bars_until(run, run.end_s)
    arrived = list(saved.history.of(GradientArrived))
    assert sum(bar.kind in {FRESH, STALE} for bar in bars) == sum(record.used for record in arrived)
    assert sum(bar.kind == "dropped" for bar in bars) == sum(not record.used for record in arrived)
    interrupted = list(saved.history.of(WorkInterrupted))
    assert sum(bar.kind == "interrupted" for bar in bars) == len(interrupted)
    if any(record.pull_s for record in arrived) and arrived[-1].push_s:  # with a server, a bar is the round trip
        drawn = {(bar.worker, bar.start_s, bar.end_s, bar.staleness) for bar in bars}
        used = [record for record in arrived if record.used]
        assert {(each.worker, each.started_s, each.now_s, each.staleness) for each in used} <= drawn
    else:  # without one, it is the computation
        assert spent_s(bar for bar in bars if bar.kind in {FRESH, STALE}) == pytest.approx(
            sum(record.compute_s for record in arrived)
        )


def test_gradients_that_overlap_a_sum_start_before_its_end(tmp_path):
    saved = train_run(tmp_path / "run", "dc_s3gd", updates=4, cluster=exponential())
    bars = bars_until(read_run(saved, ""), 1e9)
    assert [bar.kind for bar in bars if bar.worker == 0 and bar.kind != WAITING] == [FRESH, STALE, STALE, STALE]


def test_the_figure_has_the_bars_and_updates_up_to_the_last_one(saved):
    run = read_run(saved, "")
    figure = figure_class()()
    draw_tasks(figure, run, updates=10)
    (axes,) = figure.axes
    update_s = [record.now_s for record in saved.history.of(UpdateMade)][:10]
    (lines,) = axes.collections
    assert [segment[0][0] for segment in lines.get_segments()] == update_s
    drawn = sorted((patch.get_y() + ROW / 2, patch.get_x(), patch.get_width()) for patch in axes.patches)
    bars = [(bar.worker, bar.start_s, bar.end_s - bar.start_s) for bar in bars_until(run, update_s[-1])]
    assert len(drawn) == len(bars)
    assert all(one == pytest.approx(other) for one, other in zip(drawn, sorted(bars), strict=True))
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels <= {*STYLES, "update"}


def test_a_run_of_an_old_folder_is_drawn(tmp_path):
    run = read_run(write_run(tmp_path / "run", two_updates()), "")
    assert {bar.kind for bar in bars_until(run, run.end_s)} <= set(STYLES)
