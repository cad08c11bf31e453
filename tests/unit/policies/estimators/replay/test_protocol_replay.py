"""The replay of a protocol, against the coordinator itself and against examples by hand."""

from heapq import heappop, heappush
from math import inf, nan

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator_harness import coordinator
from paceline.catalogue.protocols import asp, bsp, k_batch_sync, k_sync, ssp
from paceline.coordinator.updates import NO_OTHER_WORKER
from paceline.core.events import Apply, Arrival, Compute, Interrupt
from paceline.errors import UsageError
from paceline.policies.estimators.replay.protocol_replay import ProtocolReplay
from paceline.protocols.protocol import Protocol

UNEVEN = [[1.0], [1.5, 3.0], [4.0]]


@st.composite
def protocols(draw, n):
    """Any choice of knobs that n workers may have."""
    refill = draw(st.sampled_from(["update", "arrival"]))
    quorum = draw(st.just("all") | st.integers(1, n if refill == "update" else 2 * n + 2))
    max_staleness = draw(st.sampled_from([0, 1, 2, 5, inf]))
    max_lead = draw(st.sampled_from([inf, 0, 1, 3])) if quorum != "all" else inf
    on_update = draw(st.sampled_from(["finish", "interrupt"])) if max_staleness < inf else "finish"
    return Protocol(quorum=quorum, max_staleness=max_staleness, refill=refill, on_update=on_update, max_lead=max_lead)


@st.composite
def replays(draw):
    """A protocol and round trips; most of them are multiples of one another, so that many gradients arrive at once."""
    n = draw(st.integers(1, 6))
    tied = st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0, 8.0])
    trip = draw(st.sampled_from([tied, st.floats(0, 100)]))
    trips_s = draw(st.lists(st.lists(trip, min_size=1, max_size=5), min_size=n, max_size=n))
    return draw(protocols(n)), trips_s


def updates_of_the_coordinator(protocol, trips_s, arrivals):
    """Return the times and the staleness of the updates that the coordinator makes of so many arrivals."""
    driven = coordinator(protocol, len(trips_s))
    heap, given_work, interrupted, closed_s, schedule = [], 0, set(), [], []
    now, commands = 0.0, driven.begin()
    while True:
        for command in commands:
            match command:
                case Compute(worker, _, draw):
                    given_work += 1
                    own = trips_s[worker]
                    heappush(heap, (now + own[(draw - 1) % len(own)], given_work, worker, draw))
                case Interrupt(worker, draw):
                    interrupted.add((worker, draw))
                case Apply(_, gradients, _, reason):
                    assert reason != NO_OTHER_WORKER  # the replay has no such rule
                    closed_s.append(now)
                    schedule.append(tuple(gradient.staleness for gradient in gradients))
        while heap[0][2:] in interrupted:
            heappop(heap)
        if not arrivals:
            return closed_s, schedule
        arrivals -= 1
        now, _, worker, draw = heappop(heap)
        commands = driven.handle(Arrival(now, worker, draw))


def updates_of(replay):
    assert replay.updates == len(replay.schedule)
    assert replay.gradients == sum(map(len, replay.schedule))
    assert replay.now == (replay.closed_s[-1] if replay.closed_s else 0)
    return replay.closed_s, replay.schedule


@settings(max_examples=80)
@given(replays(), st.integers(0, 80))
@example(
    (Protocol(quorum=3, max_staleness=0, refill="update", max_lead=0), [[1.0], [1.0], [5.0]]), 30
)  # two wait for the update, one computes
@example(
    (Protocol(quorum="all", max_staleness=inf, refill="arrival"), [[0.0], [1.0]]), 80
)  # no update, in whatever number of arrivals
def test_updates_are_those_of_the_coordinator(replayed, arrivals):
    replay = ProtocolReplay(*replayed)
    replay.advance(arrivals)
    assert updates_of(replay) == updates_of_the_coordinator(*replayed, arrivals)


@pytest.mark.slow
@settings(max_examples=50)
@given(replays(), st.integers(0, 60), st.integers(0, 60))
def test_a_replay_continues_from_its_state(replayed, before, after):
    whole, first, second = ProtocolReplay(*replayed), ProtocolReplay(*replayed), ProtocolReplay(*replayed)
    whole.advance(before + after)
    first.advance(before)
    second.advance(90)  # which loading undoes
    state = first.state_dict()
    second.load_state_dict(state)
    first.advance(10)  # which changes neither the state nor the second one
    second.advance(after)
    assert updates_of(second) == updates_of(whole)
    assert second.state_dict() == whole.state_dict()


def test_the_state_is_plain():
    def is_plain(value):
        return type(value) in {int, float} or (type(value) in {list, tuple} and all(map(is_plain, value)))

    replay = ProtocolReplay(ssp(lead=1), np.array([[1.0, 2.0], [2.5, 0.5]]))
    replay.advance(7)
    assert [name for name, value in replay.state_dict().items() if not is_plain(value)] == []


def test_interrupted_work_does_not_pile_up_in_the_state():
    replay = ProtocolReplay(k_sync(k=1), [[1.0], [1e6], [1e6]]).run(500)
    assert len(replay.state_dict()["heap"]) == 3


@pytest.mark.slow
@settings(max_examples=50)
@given(replays(), st.integers(0, 20))
def test_run_ends_with_the_update_that_reaches_the_gradients(replayed, gradients):
    protocol, trips_s = replayed
    trips_s = [[trip_s + 0.1 for trip_s in own] for own in trips_s]  # else no update may be made
    replay = ProtocolReplay(protocol, trips_s)
    assert replay.run(gradients) is replay
    updates_of(replay)
    assert replay.gradients >= gradients
    assert not replay.schedule or replay.gradients - len(replay.schedule[-1]) < gradients
    again = ProtocolReplay(protocol, trips_s)
    for enough in range(gradients + 1):
        again.run(enough)
    assert again.state_dict() == replay.state_dict()


def test_bsp_waits_for_the_slowest_worker():
    replay = ProtocolReplay(bsp(), UNEVEN).run(9)
    assert replay.closed_s == [4.0, 8.0, 12.0]
    assert replay.schedule == [(0, 0, 0)] * 3


def test_asp_counts_the_updates_since_each_work_was_given():
    replay = ProtocolReplay(asp(), UNEVEN).run(7)
    # Workers 0 1 0 0 2 0 1: at 4 s worker 2 comes first, because its work was given first.
    assert replay.closed_s == [1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.5]
    assert replay.schedule == [(0,), (1,), (1,), (0,), (4,), (1,), (4,)]


def test_k_batch_sync_restarts_stale_work():
    replay = ProtocolReplay(k_batch_sync(k=2), UNEVEN).run(6)
    # Gradients of workers 0 and 1; then 0 and 0, because worker 1 takes 3 s; then 0 and 1 again. None of worker 2.
    assert replay.closed_s == [1.5, 3.5, 5.0]
    assert replay.schedule == [(0, 0)] * 3


def test_ssp_blocks_a_worker_that_is_too_far_ahead():
    replay = ProtocolReplay(ssp(lead=1), [[1.0], [3.5]]).run(6)
    # Worker 0 delivers at 1 s and 2 s, is blocked until worker 1 delivers at 3.5 s, and is one ahead again at 4.5 s.
    assert replay.closed_s == [1.0, 2.0, 3.5, 4.5, 7.0, 8.0]
    assert replay.schedule == [(0,), (0,), (2,), (0,), (1,), (0,)]


def test_a_quorum_larger_than_the_workers_is_reached_by_refills_on_arrival():
    replay = ProtocolReplay(Protocol(quorum=5, max_staleness=0, refill="arrival"), [[1.0], [2.0]]).run(5)
    assert (replay.closed_s, replay.schedule) == ([4.0], [(0,) * 5])


def test_round_trips_are_used_in_turn():
    assert ProtocolReplay(asp(), [[1.0, 0.0, 2.0]]).run(5).closed_s == [1.0, 1.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("trips_s", "message"),
    [
        ([], "no worker"),
        ([[1.0], []], "worker 1 has no round trip"),
        ([[1.0], [2.0, -0.5]], "round trip -0.5 of worker 1"),
        ([[inf]], "round trip inf of worker 0"),
        ([[nan]], "round trip nan of worker 0"),
        ([["1"]], "round trip '1' of worker 0"),
        ([[1.0], [1.0]], "waits for k = 3 gradients of 2 workers"),
    ],
)
def test_what_cannot_be_replayed_is_an_error(trips_s, message):
    with pytest.raises(UsageError, match=message):
        ProtocolReplay(k_sync(k=3), trips_s)


def test_numbers_of_arrivals_and_gradients_are_not_negative():
    replay = ProtocolReplay(bsp(), UNEVEN)
    with pytest.raises(UsageError, match="events=-1"):
        replay.advance(-1)
    with pytest.raises(UsageError, match="gradients=-1"):
        replay.run(-1)


def test_a_run_without_updates_is_an_error():
    replay = ProtocolReplay(Protocol(quorum="all", max_staleness=0, refill="arrival", name="each"), [[0.0], [1.0]])
    with pytest.raises(UsageError, match="each: no update is made in 100004 arrivals after 0 s"):
        replay.run(2)


def test_a_large_quorum_is_reached():
    assert (
        ProtocolReplay(Protocol(quorum=150_000, max_staleness=0, refill="arrival"), [[0.0], [1.0]]).run(1).gradients
        == 150_000
    )
