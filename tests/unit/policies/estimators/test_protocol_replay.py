import json
from heapq import heappop, heappush
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.checkpoint.codec import decode, encode
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply, Arrival, Compute, Interrupt
from paceline.policies.estimators.protocol_replay import ProtocolReplay
from paceline.protocols.protocol import Protocol, as_plan

GRADIENTS = 60


def updates_of_coordinator(protocol, trips_s):
    """Return the times and stalenesses of the updates of a coordinator, in the order of arrivals."""
    coordinator = Coordinator(as_plan(protocol), workers=len(trips_s), stop=pl.Stop(gradients=GRADIENTS))
    heap, current, updates, now, sequence = [], {}, [], 0.0, 0
    commands = coordinator.begin()
    while True:
        for command in commands:
            match command:
                case Compute(worker, _, draw):
                    sequence += 1
                    current[worker] = draw
                    trips = trips_s[worker]
                    heappush(heap, (now + trips[(draw - 1) % len(trips)], sequence, worker, draw))
                case Interrupt(worker):
                    current[worker] = None
                case Apply():
                    updates.append((now, tuple(each.staleness for each in command.gradients)))
        if coordinator.stopped:
            return updates
        now, _, worker, draw = heappop(heap)
        is_cancelled = current[worker] != draw
        commands = [] if is_cancelled else coordinator.handle(Arrival(now, worker, draw))


@st.composite
def protocols_and_trips(draw):
    n = draw(st.integers(1, 6))
    refill = draw(st.sampled_from(["update", "arrival"]))
    quorum = draw(st.just("all") | st.integers(1, n if refill == "update" else 9))
    on_update = draw(st.sampled_from(["finish", "interrupt"]))
    staleness = draw(st.sampled_from([0, 1, 3] if on_update == "interrupt" else [0, 1, 3, inf]))
    lead = inf if quorum == "all" else draw(st.sampled_from([inf, 0, 1, 4]))
    trip_s = st.sampled_from([0.5, 1.0, 1.0, 1.5, 7.0]) | st.floats(0.01, 3)  # often equal, so that ties are tested
    trips_s = draw(st.lists(st.lists(trip_s, min_size=1, max_size=6), min_size=n, max_size=n))
    return Protocol(quorum, staleness, refill, on_update, lead), trips_s


@given(protocols_and_trips())
def test_the_updates_are_those_of_the_coordinator(case):
    protocol, trips_s = case
    expected = updates_of_coordinator(protocol, trips_s)
    replay = ProtocolReplay(protocol, trips_s).run(GRADIENTS)
    assert list(zip(replay.closed_s, replay.schedule, strict=True))[: len(expected)] == expected


@given(protocols_and_trips(), st.integers(1, 40))
def test_a_replay_goes_on_from_its_state(case, events):
    protocol, trips_s = case
    first, second = ProtocolReplay(protocol, trips_s), ProtocolReplay(protocol, trips_s)
    first.advance(events)
    second.load_state_dict(decode(json.loads(json.dumps(encode(first.state_dict(), {}))), {}))
    assert second.run(GRADIENTS).schedule == first.run(GRADIENTS).schedule
    assert second.closed_s == first.closed_s


def test_gradients_and_time_are_counted():
    replay = ProtocolReplay(pl.k_sync(k=2), [[1.0], [2.0], [5.0]]).run(6)
    assert (replay.gradients, replay.updates, replay.now) == (6, 3, 6.0)
    assert replay.schedule == [(0, 0)] * 3  # worker 2 is interrupted each time


def test_a_bounded_lead_holds_the_fast_worker_back():
    replay = ProtocolReplay(pl.ssp(lead=1), [[1.0], [10.0]]).run(6)
    assert replay.closed_s == [1.0, 2.0, 10.0, 11.0, 20.0, 21.0]


@pytest.mark.parametrize(
    ("trips_s", "match"),
    [([], "no worker"), ([[1.0], []], "without a round trip"), ([[-1.0]], r"trip_s=-1.0 is not"), ([[1.0]], "k <= 1")],
)
def test_invalid_arguments_are_refused(trips_s, match):
    with pytest.raises(pl.UsageError, match=match):
        ProtocolReplay(pl.k_sync(k=2), trips_s)
