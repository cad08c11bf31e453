"""One suite for every protocol of the catalogue."""

import re
from dataclasses import replace
from random import Random

import pytest

from catalogue_table import TABLE, WITHOUT_SERVER
from coordinator_harness import coordinator
from coordinator_invariants import InvariantChecker, run
from paceline.catalogue.parser import parse_plan
from paceline.catalogue.protocols import CATALOGUE
from paceline.core.events import Accept, Apply, Decision, Interrupt
from paceline.policies.controllers.balance import Balance
from paceline.policies.controllers.dynamic_lead import DynamicLead
from paceline.policies.controllers.patient import Patient
from paceline.protocols.protocol import as_plan

ALL = [*TABLE, *WITHOUT_SERVER]
N = 5
UPDATES = 30

DISTRIBUTIONS = {
    "all alike": lambda worker, draw: 1.0,
    "one slow": lambda worker, draw: 50.0 if worker == 0 else 1.0 + worker / 100,
    "exponential": lambda worker, draw: Random(f"{worker} {draw}").expovariate(1.0),
    "heavy tail": lambda worker, draw: Random(f"{worker} {draw}").paretovariate(0.8),
}

each_protocol = pytest.mark.parametrize("protocol", [protocol for _, protocol, _ in ALL], ids=str)


def checked_run(protocol, law, updates=UPDATES):
    checker = InvariantChecker(coordinator(protocol, N, worker_timeout_s=1e9), N, [widest(protocol)])
    return run(checker, DISTRIBUTIONS[law], updates)  # every command is checked


@pytest.fixture(scope="module", params=[protocol for _, protocol, _ in ALL], ids=str)
def checkers(request):
    """Return a protocol, and its checked run with each distribution of compute times."""
    return request.param, [checked_run(request.param, law) for law in DISTRIBUTIONS]


def knobs_of(protocol):
    [phase] = as_plan(protocol).phases
    return phase.protocol


def widest(protocol):
    """Return the knobs, with the largest lead that a controller may choose."""
    [phase] = as_plan(protocol).phases
    bounds = [controller.most for controller in phase.controllers if isinstance(controller, DynamicLead)]
    return replace(phase.protocol, max_lead=bounds[0]) if bounds else phase.protocol


def quorums(checker, protocol):
    """Return the quorum of every update, which a controller may have chosen."""
    [phase] = as_plan(protocol).phases
    if not phase.controllers:
        fixed = N if phase.protocol.quorum == "all" else phase.protocol.quorum
        return [fixed] * len(checker.updates)
    if phase.protocol.refill == "share" or any(isinstance(each, Patient) for each in phase.controllers):
        return [len(update.gradients) for update in checker.updates]  # it closes updates without a quorum
    return [decision.k for decision in all_commands(checker, Decision) if decision.kind == "quorum"]


def all_commands(checker, kind):
    return [command for commands in checker.commands for command in commands if isinstance(command, kind)]


def test_the_table_has_every_protocol_of_the_catalogue():
    assert {name for name, _, _ in ALL} == set(CATALOGUE)


@pytest.mark.parametrize(("name", "protocol", "knobs"), ALL)
def test_knobs_match_the_design(name, protocol, knobs):
    given = knobs_of(protocol)
    found = (given.quorum, given.max_staleness, given.refill, given.on_update, given.max_lead)
    assert found == knobs


@pytest.mark.parametrize("factory", CATALOGUE.values(), ids=CATALOGUE)
def test_every_protocol_has_a_description_a_paper_and_a_year(factory):
    summary, _, rest = factory.__doc__.partition("\n")
    assert summary.endswith(".")
    assert re.search(r"Paper: .* \d{4}", rest)


@each_protocol
def test_a_protocol_is_read_back_from_its_name(protocol):
    assert parse_plan(str(protocol)) == as_plan(protocol)


def test_updates_are_made_one_version_at_a_time(checkers):
    for checker in checkers[1]:
        assert [update.version for update in checker.updates] == list(range(1, UPDATES + 1))


def test_every_update_has_the_required_quorum(checkers):
    protocol, checkers = checkers
    for checker in checkers:
        for update, quorum in zip(checker.updates, quorums(checker, protocol), strict=False):
            assert len(update.gradients) == quorum
            if knobs_of(protocol).refill == "update":
                assert len({accepted.worker for accepted in update.gradients}) == quorum
            if knobs_of(protocol).refill == "share":
                assert update.workload == N <= quorum


def test_accepted_gradients_enter_one_update_each_in_order_and_within_the_bound(checkers):
    protocol, checkers = checkers
    for checker in checkers:
        applied = [accepted for update in all_commands(checker, Apply) for accepted in update.gradients]
        accepted = all_commands(checker, Accept)
        assert applied == accepted[: len(applied)]
        assert len({(a.worker, a.draw) for a in accepted}) == len(accepted)
        assert max(a.staleness for a in accepted) <= knobs_of(protocol).max_staleness


def test_tasks_are_interrupted_only_by_protocols_with_interrupts(checkers):
    protocol, checkers = checkers
    for law, checker in zip(DISTRIBUTIONS, checkers, strict=True):
        [phase] = as_plan(protocol).phases
        repeats = any(each.queue and each.repeats for each in phase.controllers if isinstance(each, Balance))
        is_expected = repeats or (knobs_of(protocol).on_update == "interrupt" and min(quorums(checker, protocol)) < N)
        assert bool(all_commands(checker, Interrupt)) == is_expected, law


@each_protocol
def test_the_same_durations_lead_to_the_same_commands(protocol):
    assert checked_run(protocol, "exponential").commands == checked_run(protocol, "exponential").commands


@each_protocol
def test_updates_go_on_when_all_but_one_worker_are_lost(protocol):
    checker = checked_run(protocol, "exponential")
    for worker in range(1, N):
        checker.lose(worker)
    before = len(checker.updates)
    for _ in range(100):
        checker.arrive(0)
    assert len(checker.updates) >= before + 3


@each_protocol
def test_no_worker_exceeds_the_maximum_lead(protocol):
    checker = checked_run(protocol, "one slow")
    deliveries = checker.deliveries.values()
    furthest = widest(protocol).max_lead + 1  # one more is delivered by who started at the bound
    assert max(deliveries) - min(deliveries) <= furthest
