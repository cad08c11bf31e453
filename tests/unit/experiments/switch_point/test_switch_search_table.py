"""Table of a search for the switch point."""

from math import nan
from pathlib import Path

import paceline as pl
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.switch_timing import FoundFor, SwitchTiming
from paceline.experiments.switch_point.bisection import Bisection
from paceline.experiments.switch_point.result import SwitchSearch
from paceline.experiments.switch_point.trials import Trials, TrialSpec
from paceline.run.config import RunConfig
from tiny_jobs import dataset, tiny_job

ALONE = Trials(1.0, (0.9, 0.92), (100.0, 120.0))


def a_search(first="bsp", alone=ALONE, **changes):
    config = RunConfig(
        job=tiny_job(eval_data=dataset()), plan=parse_plan("bsp"), cluster=pl.Cluster(4), stop=pl.Stop(epochs=2), seed=0
    )
    trial = TrialSpec(config=config, first=first, then="asp")
    bisection = Bisection(target=0.91, margin=0.01, settings=2, **changes)
    tried = (Trials(0.5, (0.92, 0.9), (50.0, 60.0)), Trials(0.25, (0.95, nan), (25.0, 5.0)))
    timing = SwitchTiming(
        fraction=0.5,
        first=first,
        then="asp",
        found_for=FoundFor(file="timing.toml", job="tiny", model="75 parameters", batch_size=8, workers=4),
    )
    return SwitchSearch(
        trial=trial, bisection=bisection, seeds=(0, 1), folder=Path("runs"), alone=alone, tried=tried, timing=timing
    )


def test_the_table_lists_every_trial():
    lines = [line.split() for line in a_search().text().splitlines()]
    assert ["100%", "0.9100", "(0.9000", "to", "0.9200)", "110", "1", "-"] in lines
    assert ["50%", "0.9100", "(0.9000", "to", "0.9200)", "55", "0.5", "yes"] in lines
    assert ["25%", "1", "of", "2", "diverged", "25", "0.227", "no"] in lines
    printed = " ".join(a_search().text().split())
    assert "Found: bsp for 50% of the workload, then asp, 2.00 x faster than bsp alone." in printed
    assert "All runs together took 360 s, as much as 3.27 runs of bsp alone." in printed
    assert "target mean accuracy 0.9100 +- 0.01" in " ".join(a_search(two_sided=True).text().split())


def test_without_baseline_runs_the_table_has_no_speed_up():
    printed = a_search(alone=None).text()
    assert ["50%", "0.9100", "(0.9000", "to", "0.9200)", "55", "-", "yes"] in [
        line.split() for line in printed.splitlines()
    ]
    assert "faster" not in printed
    assert "as much as" not in printed


def test_the_table_fits_80_columns():
    first = "ringmaster(r=12, stops=true) + staleness_weight(weighting='1/(1+tau)') + dc_asgd(lambda0=2, m=0.95)"
    large = Trials(1.0, (0.912345678, 0.92), (123456.7, 1234567.8))
    lines = a_search(first, large).text().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]
