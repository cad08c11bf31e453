"""Dynamic SSP: the lead that the fastest worker gets, by hand and in runs."""

import re
from dataclasses import dataclass, replace

import pytest

import paceline as pl
from driven_controller import Driven
from paceline.coordinator.ssp_bound import SSPBound
from paceline.core.events import Arrival
from paceline.core.records import DecisionMade, GradientArrived
from paceline.policies.controllers.base import SetLead
from tiny_jobs import tiny_job


def leads(controller, arrivals, n=2):
    """Return the lead after each arrival (seconds, worker)."""
    driven = Driven(controller, n, pl.ssp(controller.lead))
    told, bound = [], SSPBound(controller.lead)
    for worker in range(n):
        bound.join(worker)
    for now, worker in arrivals:
        driven.now = now
        bound.deliver(worker)
        driven.ask("arrival", arrival=Arrival(now, worker, 1), accepted=True)
        driven.ask("open", workers=range(n), leads=bound.leads)
        for action in driven.actions:
            assert isinstance(action, SetLead)
            driven.protocol = replace(driven.protocol, max_lead=action.lead)
        told.append(driven.protocol.max_lead)
    return told


@pytest.mark.parametrize(
    ("own_s", "last_s", "most", "lead"),
    [
        (2.0, 8.5, 9, 2),  # 1 more at 10.5 s waits 1.5 s, 0 and 2 more wait 3.5 s
        (1.0, 8.5, 9, 4),  # 3 more at 11.5 s wait 0.5 s
        (1.0, 8.5, 3, 3),  # at most 2 more, at 10.5 s
        (2.2, 11.9, 3, 1),  # none waits 0.1 s, 1 more 1.9 s
    ],
)
def test_the_fastest_worker_gets_the_lead_with_the_least_wait(own_s, last_s, most, lead):
    """Worker 1 has delivered at 4 and 8 s, so it is expected at 12, 16 ... s; worker 0 delivers for the fourth time."""
    fast = [(last_s - own_s * before, 0) for before in (3, 2, 1, 0)]
    arrivals = sorted([(4.0, 1), (8.0, 1), *fast])
    assert leads(pl.controllers.DynamicLead(lead=1, most=most), arrivals)[-1] == lead


def test_the_lead_never_exceeds_the_bounds_and_returns():
    cluster = pl.Cluster(4, [pl.timing.Exponential(1.0)] * 3 + [pl.timing.Exponential(5.0)])
    result = pl.train(tiny_job(), protocol="dssp(lead=1, most=4)", cluster=cluster, stop="updates=80")
    decided = result.history.of(DecisionMade)
    told = [int(r.reason.partition("=")[2].partition(":")[0]) for r in decided if r.kind == "lead"]
    assert [r.kind for r in decided if r.kind != "lead"] == ["protocol"]  # the run begins
    assert min(told) == 1
    assert 1 < max(told) <= 4
    delivered = [0] * 4
    for record in result.history.of(GradientArrived):
        delivered[record.worker] += 1
        assert max(delivered) - min(delivered) <= 5  # it starts at most 4 ahead


@pytest.mark.slow
def test_a_bound_that_another_controller_removes_stays_removed():
    slowed = [pl.timing.Slowdown(at_s=9, until_s=30, factor=5, workers=(1,))]
    cluster = pl.Cluster(4, pl.timing.Uniform(0.95, 1.05), slowdowns=slowed)
    result = pl.train(tiny_job(), protocol="dssp(lead=0, most=1) + greedy", cluster=cluster, stop="updates=200")
    told = [r.reason for r in result.history.of(DecisionMade) if r.kind == "protocol"]
    left = next(i for i, reason in enumerate(told) if reason.startswith("asp"))
    assert told[left + 1].startswith("dssp")
    assert "all stragglers have recovered" in told[left + 1]


@dataclass(frozen=True)
class Changing(pl.controllers.Controller):
    """Controller that changes to another protocol with a bound after each number of updates."""

    every: int

    def begin(self, n):
        return None

    def decide(self, state, observation):
        if observation.trigger != "open" or not observation.version or observation.version % self.every:
            return state, []
        bounded = replace(pl.ssp(lead=1), quorum=1 + observation.version // self.every % 2, name="other")
        return state, [pl.controllers.ChangeProtocol(bounded, "the next one")]


@pytest.mark.slow
def test_a_lead_is_counted_from_a_change_of_the_protocol_by_another_controller():
    cluster = pl.Cluster(4, [pl.timing.Exponential(1.0)] * 3 + [pl.timing.Exponential(5.0)])
    protocol = pl.dssp(lead=1, most=4) + Changing(every=20)
    result = pl.train(tiny_job(), protocol=protocol, cluster=cluster, stop="updates=200")
    delivered, told = [0] * 4, 0
    for record in result.history:
        if isinstance(record, GradientArrived):
            delivered[record.worker] += 1
        elif isinstance(record, DecisionMade) and record.kind == "protocol":
            delivered = [0] * 4
        elif isinstance(record, DecisionMade):
            told += 1
            fastest, ahead, slowest = map(int, re.findall(r"\d+", record.reason.partition(": ")[2]))
            assert ahead == delivered[fastest] - min(delivered)
            assert delivered[slowest] == min(delivered)
    assert told > 5


def test_equal_bounds_are_ssp():
    cluster = pl.Cluster(4, pl.timing.Exponential(1.0))
    same = [pl.simulate(protocol, cluster, updates=300).time_s for protocol in ("dssp(lead=2, most=2)", "ssp(lead=2)")]
    assert same[0] == same[1]


def test_the_fastest_worker_waits_less_than_under_ssp():
    cluster = pl.Cluster(4, [pl.timing.Uniform(0.9, 1.1)] * 3 + [pl.timing.Uniform(3.6, 4.4)])
    idle = [
        pl.simulate(each, cluster, updates=500).totals.idle_share for each in ("dssp(lead=1, most=8)", "ssp(lead=1)")
    ]
    assert idle[0] < idle[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dssp(lead=3, most=2)", "most=2 is below lead=3; give most >= lead"),
        ("dssp(lead=-1, most=2)", "lead"),
        ("dssp(lead=1, most=1.5)", "most"),
        ("dssp(lead=1)", "most"),
    ],
)
def test_invalid_bounds_are_refused(text, words):
    with pytest.raises(pl.UsageError, match=words):
        pl.simulate(text, "4*exp(mean=1)", updates=5)
