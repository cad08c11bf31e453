"""Shares by speed: when they are decided, and by which workers' times."""

from dataclasses import replace
from math import inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from arrivals import arrival
from coordinator_harness import coordinator
from paceline.checkpoint.codec import decode, encode
from paceline.core.events import Compute, Decision, Joined, Lost
from paceline.policies.controllers.balance import ShareState
from paceline.policies.shares import Pieces, cut_in_leases

BALANCED = pl.balanced(m=8, leases=1)


class Driven:
    """Coordinator whose workers take these seconds for a minibatch, and a part of them for a share of one."""

    def __init__(self, seconds, plan=BALANCED, **settings):
        self.driven = coordinator(plan, len(seconds), **settings)
        self.seconds = dict(enumerate(seconds))
        self.now, self.log, self.flying = 0.0, [], {}
        self._take(self.driven.begin())

    def _take(self, commands):
        for command in commands:
            if isinstance(command, Compute):
                share = command.minibatch.share if command.minibatch else 1.0
                due_s = self.now + share * self.seconds[command.worker]
                self.flying[command.worker] = (due_s, command.draw, share)
            elif isinstance(command, Decision) and command.kind == "shares":
                self.log.append((self.driven.version, command.reason))

    def event(self, event):
        self.flying.pop(event.worker, None)
        self._take(self.driven.handle(event))

    def updates(self, count):
        """Make updates, and return the shares of each."""
        found = []
        for _ in range(count):
            found.append([share for _, (_, _, share) in sorted(self.flying.items())])
            before = self.driven.version
            while self.driven.version == before:
                worker = min(self.flying, key=self.flying.get)
                self.now, draw, _ = self.flying.pop(worker)
                self._take(self.driven.handle(arrival(self.now, worker, draw)))
        return found


EQUAL, UNEQUAL = [1.0] * 4, [1.125, 1.125, 1.125, 0.625]


def test_shares_follow_two_updates_of_which_the_latest_is_left_out():
    driven = Driven([1, 1, 1, 2])
    assert driven.updates(6) == [EQUAL] * 3 + [UNEQUAL] * 3
    assert driven.log == [(3, "9, 9, 9, 5 samples: an update takes 1.25 s, and 2 s with the shares before")]


def test_shares_are_whole_pieces_of_the_minibatches():
    driven = Driven([1, 1, 1, 2], batch_size=20)  # pieces of 2
    assert driven.updates(5)[-1] == [1.1, 1.1, 1.1, 0.7] or driven.updates(1) == [[1.2, 1.1, 1.1, 0.6]]


def test_a_worker_that_is_lost_leaves_shares_of_the_others_at_once():
    driven = Driven([1, 1, 1, 2])
    driven.updates(5)
    driven.event(Lost(driven.now, 0, "unplugged"))
    assert driven.updates(3) == [[1.125, 1.125, 0.625], [1.25, 1.125, 0.625], [1.25, 1.125, 0.625]]


def test_a_worker_that_joins_has_two_times_before_shares_change():
    driven = Driven([1, 1, 1, 2])
    driven.updates(5)
    driven.event(Lost(driven.now, 0, "unplugged"))
    driven.updates(5)
    driven.event(Joined(driven.now, 0))
    driven.updates(1)
    assert driven.updates(5) == [EQUAL] * 2 + [UNEQUAL] * 3


def test_a_time_of_a_gradient_that_is_not_finite_does_not_count():
    driven = Driven([1, 1, 1, 2])
    due_s, draw, _ = driven.flying.pop(0)
    driven.now = due_s
    driven._take(driven.driven.handle(arrival(due_s, 0, draw, finite=False)))
    driven.updates(6)
    assert driven.log[0][1].startswith("9, 9, 9, 5 samples")


def test_seconds_that_a_worker_has_measured_count_in_place_of_the_round_trip():
    found = {}
    for measured in (0.5, 0.0):
        driven = coordinator(BALANCED, 2)
        commands, now = driven.begin(), 0.0
        for _ in range(4):
            computes = [each for each in commands if isinstance(each, Compute)]
            commands = []
            for each in computes:
                now += 1
                share = each.minibatch.share if each.minibatch else 1.0
                commands += driven.handle(arrival(now, each.worker, each.draw, compute_s=measured * share))
        found[measured] = [each for each in computes if each.minibatch]
    assert not found[0.5]
    assert found[0.0]


def test_a_saved_controller_decides_as_if_it_had_not_been_saved():
    [balance] = BALANCED.controllers
    driven = Driven([1, 1, 1, 2])
    driven.updates(2)
    state = driven.driven._phases.controllers._states[0]
    saved = decode(encode(balance.state_dict(state), {}), {})
    restored = balance.load_state_dict(saved)
    assert encode(balance.state_dict(restored), {}) == encode(balance.state_dict(state), {})


@pytest.mark.parametrize("protocol", [pl.k_sync(k=3), pl.asp(), pl.pull(k=3), replace(pl.bsp(), refill="arrival")])
def test_other_updates_than_those_of_all_workers_are_refused(protocol):
    with pytest.raises(pl.UsageError, match="type balanced"):
        coordinator(protocol + pl.controllers.Balance(), 4)


def test_a_resumed_queue_deals_as_before_though_a_worker_is_lost():
    first = Driven([1, 1, 1, 2], pl.balanced(m=8))
    first.updates(4)
    first.event(Lost(first.now, 1, "unplugged"))
    first.updates(3)
    again = Driven([1, 1, 1, 2], pl.balanced(m=8))
    tensors = {}
    again.driven.load_state_dict(decode(encode(first.driven.state_dict(), tensors), tensors))
    again.now, again.flying = first.now, dict(first.flying)
    assert again.updates(5) == first.updates(5)


def test_the_cost_of_a_lease_is_what_two_leases_of_a_worker_have_in_common():
    state = ShareState(2)
    state.add(0, samples=16, seconds=1.65)
    assert state.lease_s == 0.0
    state.add(0, samples=2, seconds=0.25)  # 0.05 s, and 0.1 s a sample
    state.add(1, samples=16, seconds=1.65)
    assert state.lease_s == pytest.approx(0.05)
    assert state.latest[1] == (16, pytest.approx(1.6))
    again = ShareState(2)
    again.load_state_dict(decode(encode(state.state_dict(), {}), {}))
    again.add(1, samples=2, seconds=0.35)
    assert again.lease_s == pytest.approx((0.05 + (0.35 * 16 - 1.65 * 2) / 14) / 2)


def test_leases_are_whole_shares_where_further_ones_do_not_pay():
    shares, sizes, seconds = (16, 16, 16, 16), Pieces(16), [0.00625] * 4
    late_s = 0.1 * 0.05 * (2 * log(4)) ** 0.5  # of the slowest of four
    gain_s = late_s - sizes.size * 0.00625 / 2  # of one piece that each worker leaves
    assert cut_in_leases(shares, sizes, 0.05, seconds, 0.99 * gain_s) == ((14, 14, 14, 14), 2)
    assert cut_in_leases(shares, sizes, 0.05, seconds, 1.01 * gain_s).firsts == shares
    assert cut_in_leases((16,), sizes, 0.05, [0.00625]) == ((16,), 2)
    assert cut_in_leases(shares, sizes, inf, [nan] * 4) == ((8, 8, 8, 8), 2)


@given(st.floats(0.05, 1), st.floats(0, 0.5), st.lists(st.floats(0.001, 1), min_size=2, max_size=8), st.integers(1, 16))
def test_later_leases_cost_least_in_whole_pieces_but_for_the_rounding_of_their_number(spread, lease_s, seconds, pieces):
    """The end is half a lease late, and each lease has a cost."""
    sizes = Pieces(16, pieces, max_share=2.0)
    firsts, later = cut_in_leases([16] * len(seconds), sizes, spread, seconds, lease_s)
    left, piece_s = (16 - firsts[0]) // sizes.size, min(seconds) * sizes.size
    assert sizes.size <= later <= sizes.most
    if left:
        costs = [number * piece_s / 2 + lease_s * left / number for number in range(1, left + 1)]
        assert costs[later // sizes.size - 1] <= min(costs) * 1.07
        assert costs[later // sizes.size - 1] < 16 * max(seconds) * spread * (2 * log(len(seconds))) ** 0.5


def test_later_leases_are_no_larger_than_a_share_may_be():
    """A share of a queue is not limited, its leases are: here one worker is known, and the others hang."""
    assert cut_in_leases([1000, 4, 4], Pieces(16), 0.5, [0.01, 10, 10], lease_s=5.0).later == 24
