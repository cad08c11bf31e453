"""Every worked example of CONTRIBUTING.md runs, and what it adds simulates and trains."""

import re

import pytest

from paceline.catalogue.protocols import CATALOGUE
from paceline.core.events import Outcome
from paths import ROOT

pytestmark = pytest.mark.docs
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"^## Add an? (\w+)\n.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


@pytest.fixture
def run():
    """Run an example and return its names; a protocol that it adds leaves the catalogue afterwards."""
    before = dict(CATALOGUE)

    def run(part):
        names = {"__name__": "contributed"}
        exec(compile(EXAMPLES[part], f"CONTRIBUTING.md, {part}", "exec"), names)
        return names

    yield run
    CATALOGUE.clear()
    CATALOGUE.update(before)


def test_there_is_an_example_for_each_part():
    assert list(EXAMPLES) == ["protocol", "controller", "compensator", "cluster"]


def test_the_added_protocol_simulates_and_trains(run):
    example = run("protocol")
    assert example["simulated"].totals.updates == 100
    assert example["simulated"].totals.mean_k == 2
    assert example["result"].stopped_by is Outcome.UPDATES


def test_the_added_controller_chooses_the_quorum(run):
    example = run("controller")
    assert example["simulated"].totals.used == 10 * 1 + 10 * 2 + 10 * 3 + 20 * 4
    assert [example["result"].history.columns()["k"][i] for i in (0, 10, 20, 30)] == [1, 2, 3, 4]


def test_the_added_compensator_scales_the_steps_of_stale_gradients(run):
    example = run("compensator")
    arrivals = example["result"].history.of(example["pl"].callbacks.GradientArrived)
    stale = [arrival for arrival in arrivals if arrival.used and arrival.staleness]
    assert stale
    assert all(arrival.compensations[0][1] == 1 / (1 + 0.5 * arrival.staleness) for arrival in stale)


def test_the_added_cluster_runs_a_protocol(run):
    example = run("cluster")
    assert example["end"].outcome is Outcome.UPDATES
    assert example["workers"].now == 40  # ten updates of 4 s, the time of the slowest worker
