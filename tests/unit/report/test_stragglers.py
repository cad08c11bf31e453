"""Stragglers: named in the summary, also where no piece of their work was finished."""

import re

import pytest

import paceline as pl
from paceline.report.curves import groups
from paceline.report.page.page import page
from paceline.report.run_data import read_run
from paceline.report.stragglers import stragglers
from selections import parametrize_few
from written_runs import begun, exponential, train_run, two_updates, write_run

ONE_SLOW = pl.Cluster(4, pl.timing.ShiftedExponential(shift_s=0.9, mean_s=0.1), speed=[1.0, 1.0, 0.25, 1.0])


def sentences(tmp_path, protocol, cluster=ONE_SLOW, updates=40):
    return stragglers(read_run(train_run(tmp_path / "run", protocol, cluster=cluster, updates=updates), ""))


@pytest.mark.slow
def test_a_worker_whose_gradients_were_all_dropped_is_named_with_its_round_trips(tmp_path):
    (sentence,) = sentences(tmp_path, "backup(k=3)")
    assert re.match(r"worker 2 was (3\.[89]|4\.[01]) x slower than the median and contributed ", sentence)
    assert sentence.endswith(" x slower than the median and contributed nothing")


@pytest.mark.slow
def test_a_worker_that_was_always_interrupted_has_a_lower_bound_of_its_time(tmp_path):
    (sentence,) = sentences(tmp_path, "k_sync(k=3)")
    assert sentence.startswith("worker 2 was at least 1.")
    assert sentence.endswith(" x slower than the median and contributed nothing")


@pytest.mark.slow
def test_a_slow_worker_that_contributed_is_named_with_its_share(tmp_path):
    (sentence,) = sentences(tmp_path, "asp", updates=130)
    assert re.match(r"worker 2 was (3\.[89]|4\.[01]) x slower than the median and contributed ", sentence)
    share = float(sentence.partition("contributed ")[2].partition("%")[0])
    assert share == pytest.approx(100 * 0.25 / 3.25, abs=2)
    assert sentence.endswith("of the gradients (25.0% is an equal share)")


def test_a_slow_worker_is_named_with_the_time_for_which_updates_waited(tmp_path):
    slow = pl.Cluster(5, [pl.timing.Deterministic(seconds) for seconds in (1.0, 4.0, 1.0, 3.0, 1.0)])
    first, second = sentences(tmp_path, "bsp", cluster=slow)
    assert first.startswith("worker 1 was 4.0 x slower than the median")
    assert first.endswith("(20.0% is an equal share); updates waited 40 s for it alone, 25% of the time")
    assert second.endswith("(20.0% is an equal share)")


def test_a_worker_interrupted_at_the_median_is_reported_as_interrupted(tmp_path):
    alike_but_one = pl.Cluster(
        4,
        [
            pl.timing.Deterministic(1.0),
            pl.timing.Deterministic(1.0),
            pl.timing.Deterministic(4.6),
            pl.timing.Deterministic(1.0),
        ],
    )
    (sentence,) = sentences(tmp_path, "k_sync(k=3)", cluster=alike_but_one)
    assert sentence == (
        "worker 2 was interrupted before it finished (after 1 s, where the median round trip is 1 s) "
        "and contributed nothing"
    )


def test_a_worker_that_is_less_than_twice_as_slow_is_named_if_that_is_no_chance(tmp_path):
    cluster = pl.Cluster(4, pl.timing.ShiftedExponential(shift_s=0.9, mean_s=0.1), speed=[1.0, 1.0, 1.0, 1 / 1.7])
    (sentence,) = sentences(tmp_path, "asp", cluster=cluster, updates=60)
    assert sentence.startswith("worker 3 was 1.8 x slower than the median and contributed ")


@parametrize_few("protocol", ["k_sync(k=3)", "asp", "bsp"], keep=1)
def test_equal_workers_are_not_stragglers(tmp_path, protocol):
    assert sentences(tmp_path, protocol, cluster=exponential()) == []


def test_the_page_names_the_straggler_above_its_sections(tmp_path):
    run = read_run(train_run(tmp_path / "run", "backup(k=3)", cluster=ONE_SLOW), "run")
    text = page([run], groups([run]))
    assert re.search(
        r"Worker 2 was (3\.[89]|4\.[01]) x slower than the median and contributed nothing\.",
        text.partition("<main>")[0],
    )


def test_empty_sections_are_omitted(tmp_path):
    empty = read_run(write_run(tmp_path / "empty", [begun()]), "")
    text = page([empty], groups([empty]))
    assert "Samples applied and dropped" not in text
    assert "Use of worker time" not in text
    assert "no data yet" not in text
    whole = read_run(write_run(tmp_path / "whole", two_updates()), "")
    assert "Samples applied and dropped" in page([whole], groups([whole]))


@pytest.mark.slow
def test_of_many_stragglers_the_slowest_are_named_and_the_others_counted(tmp_path):
    cluster = pl.Cluster(12, pl.timing.Deterministic(1.0), speed=[1.0] * 7 + [1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6])
    found = sentences(tmp_path, "asp", cluster=cluster, updates=250)
    assert [sentence.split(" x ")[0] for sentence in found] == [
        *(f"worker {worker} was {worker - 5}.0" for worker in (11, 10, 9, 8)),
        "1 more worker was a straggler",
    ]
