"""What holds for every choice of knobs, whatever happens in whatever order."""

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator_harness import coordinator
from coordinator_invariants import InvariantChecker
from naive_coordinator import NaiveCoordinator, told
from paceline.catalogue.protocols import asp, backup, k_batch_async, k_sync, pull
from paceline.coordinator.minibatch_sampler import MinibatchSampler
from paceline.coordinator.ssp_bound import SSPBound
from paceline.core.events import Accept, Apply, Arrival, Compute, Decision, Drop, Interrupt, Joined, Lost, Minibatch
from paceline.policies.controllers.base import (
    CallAgainAt,
    ChangeProtocol,
    CloseUpdate,
    Controller,
    Exclude,
    Probe,
    Readmit,
    ReplaceWorker,
    SetQuorum,
)
from paceline.protocols.protocol import Phase, Plan, Protocol
from selections import parametrize_few

MOST_WORKERS = 6
workers = st.integers(1, MOST_WORKERS)
small = st.integers(0, MOST_WORKERS)


@st.composite
def protocols(draw, n, name):
    """Any choice of knobs that a Protocol of n workers may have."""
    refill = draw(st.sampled_from(["update", "arrival"]))
    quorum = draw(st.just("all") | st.integers(1, n if refill == "update" else 2 * n + 2))
    max_staleness = draw(st.sampled_from([0, 1, 2, 5, inf]))
    max_lead = draw(st.sampled_from([inf, 0, 1, 3])) if quorum != "all" else inf
    on_update = draw(st.sampled_from(["finish", "interrupt"])) if max_staleness < inf else "finish"
    return Protocol(
        quorum=quorum, max_staleness=max_staleness, refill=refill, on_update=on_update, max_lead=max_lead, name=name
    )


@st.composite
def plans(draw, n, units=("updates", "gradients", "seconds")):
    """One to three phases, and all their protocols."""
    count = draw(st.integers(1, 3))
    phases = [Phase(draw(protocols(n, f"phase{i}"))) for i in range(count)]
    unit = draw(st.sampled_from(units))
    ends = sorted(draw(st.sets(st.integers(1, 30), min_size=count - 1, max_size=count - 1)))
    phases[:-1] = [phase.until(**{unit: end}) for phase, end in zip(phases, ends, strict=False)]
    return Plan(tuple(phases)), [phase.protocol for phase in phases]


@dataclass(frozen=True)
class Whims(Controller):
    """Answers every question with the next entry of a list of actions."""

    answers: tuple

    def begin(self, n):
        return 0

    def decide(self, state, observation):
        return state + 1, self.answers[state] if state < len(self.answers) else ()


class MeasuringWhims(Whims):
    """The same, and has every step measured."""

    reads = "steps"


@st.composite
def whims(draw, n):
    """A controller that does anything at any time, and the protocols that it may choose."""
    choices = [draw(protocols(n, f"whim{i}")) for i in range(2)]
    action = st.one_of(
        st.builds(SetQuorum, st.integers(1, 2 * n), st.just("whim")),
        st.just(CloseUpdate("whim")),
        st.builds(ChangeProtocol, st.sampled_from(choices), st.just("whim"), st.booleans()),
        st.builds(Exclude, st.integers(0, n - 1), st.just("whim")),
        st.builds(Readmit, st.integers(0, n - 1), st.just("whim")),
        st.builds(Probe, st.integers(0, n - 1)),
        st.builds(ReplaceWorker, st.integers(0, n - 1)),
        st.builds(CallAgainAt, st.integers(0, 60).map(float)),
    )
    answers = draw(st.lists(st.lists(action, max_size=2), max_size=20))
    kind = draw(st.sampled_from([Whims, MeasuringWhims]))
    return kind(tuple(map(tuple, answers))), choices


# Kind of an event and number of its worker; most events are arrivals.
happenings = st.lists(
    st.tuples(
        st.sampled_from(["arrival"] * 8 + ["not finite", "old draw", "probe", "lost", "joined", "joined", "timer"]),
        small,
    ),
    max_size=60,
)


def happen(checker, what, number):
    """Let one thing happen; what cannot happen now does not."""
    flying = list(checker.in_flight)
    if checker.stopped:  # every silent worker may be lost
        return
    if what in {"arrival", "not finite"} and flying:
        checker.arrive(flying[number % len(flying)], finite=what == "arrival", dt=0.5)
    elif what == "old draw":
        if checker.draws[number] > 1:
            checker.arrive(number, draw=checker.draws[number] - 1, dt=0.0)
    elif what == "probe" and checker.probed:
        checker.arrive(sorted(checker.probed)[number % len(checker.probed)], dt=0.5)
    elif what == "lost" and len(checker.live) > 1 and number in checker.live:
        checker.lose(number)
    elif what == "joined":
        checker.join(number % MOST_WORKERS)
    elif what == "timer":
        checker.timer(dt=float(number))


def an_update_is_made_soon(checker):
    """From now on every live worker delivers what it is given; each round in another order."""
    made = len(checker.updates)
    for rounds in range(4 * MOST_WORKERS):
        in_flight = [(worker, checker.draws[worker]) for worker in checker.in_flight]
        for worker, draw in in_flight if rounds % 2 else reversed(in_flight):
            if worker in checker.in_flight and checker.draws[worker] == draw and not checker.stopped:
                checker.arrive(worker)
        if len(checker.updates) > made or checker.stopped:
            return True
    return False


@given(data=st.data(), n=workers, steps=happenings)
def test_invariants_hold_and_updates_continue_under_any_plan(data, n, steps):
    plan, known = data.draw(plans(n))
    timeout_s = data.draw(st.sampled_from([None, 3.0, 1000.0]))
    checker = InvariantChecker(coordinator(plan, n, worker_timeout_s=timeout_s), n, known)
    for what, number in steps:
        happen(checker, what, number)
    if not checker.live and not checker.stopped:
        checker.join(0)
    assert checker.stopped or an_update_is_made_soon(checker)


@settings(max_examples=12)
@given(data=st.data(), n=workers, steps=happenings)
def test_invariants_hold_and_updates_continue_under_any_controllers(data, n, steps):
    protocol = data.draw(protocols(n, "first"))
    (one, some), (other, more) = data.draw(whims(n)), data.draw(whims(n))
    more = [
        Protocol(
            quorum=p.quorum,
            max_staleness=p.max_staleness,
            refill=p.refill,
            on_update=p.on_update,
            max_lead=p.max_lead,
            name=f"other {p}",
        )
        for p in more
    ]
    other = type(other)(
        tuple(
            tuple(
                ChangeProtocol(more[int(action.protocol.name[-1])], action.reason, action.counts)
                if isinstance(action, ChangeProtocol)
                else action
                for action in answer
            )
            for answer in other.answers
        )
    )
    plan = protocol.controlled_by(one, other)
    checker = InvariantChecker(coordinator(plan, n), n, [protocol, *some, *more])
    for what, number in steps:
        happen(checker, what, number)
    for _ in range(12):  # let the controllers run out of whims
        checker.timer(dt=2.0)
        if not checker.live:
            checker.join(0)
        an_update_is_made_soon(checker)
    assert an_update_is_made_soon(checker)


@settings(max_examples=40)
@given(data=st.data(), n=workers, steps=happenings)
def test_the_same_events_are_answered_by_the_same_commands(data, n, steps):
    plan, known = data.draw(plans(n))
    one, other = (InvariantChecker(coordinator(plan, n), n, known) for _ in range(2))
    for what, number in steps:
        happen(one, what, number)
        happen(other, what, number)
    assert one.commands == other.commands


@settings(max_examples=50)
@given(data=st.data(), n=workers, steps=happenings)
def test_the_coordinator_equals_the_naive_one_of_the_design_page(data, n, steps):
    plan, known = data.draw(plans(n, units=("updates",)))
    ends = [phase.end and phase.end.amount for phase in plan.phases]
    naive = NaiveCoordinator(zip(known, ends, strict=True), n)
    checker = InvariantChecker(coordinator(plan, n), n, known)
    both = [(None, naive.begin())]
    handle = checker.driven.handle

    def handle_twice(event):
        if isinstance(event, Arrival | Joined | Lost):
            both.append((event, naive.handle(event)))
        return handle(event)

    checker.driven.handle = handle_twice
    for what, number in steps:
        assume(not (what == "old draw" and number not in checker.live))  # a late return: the naive one has no timeouts
        if what != "timer":
            happen(checker, what, number)
    for commands, (event, expected) in zip(checker.commands, both, strict=True):
        assert told(commands) == told(expected), event


# -- lead


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "deliver", "deliver"]), small)), st.sampled_from([0, 1, 3]))
def test_the_ssp_bound_equals_a_plain_count(steps, bound):
    lead, counts, fewest = SSPBound(bound), {}, 0
    for what, worker in steps:
        if (what == "join") == (worker in counts):
            continue
        before = fewest
        if what == "join":
            lead.join(worker)
            counts[worker] = fewest
        elif what == "leave":
            del counts[worker]
            rose = lead.leave(worker)
        else:
            counts[worker] += 1
            rose = lead.deliver(worker)
        fewest = min(counts.values(), default=fewest)
        if what != "join":
            assert rose == (fewest > before)
        assert [lead.may_start(w) for w in counts] == [counts[w] - fewest <= bound for w in counts]


# -- minibatches


class Dealt:
    """Which minibatches are out and which were applied, from events and commands."""

    def __init__(self, commands):
        self.out, self.held, self.applied, self.discarded = {}, [], [], []
        self.see(None, commands)

    def see(self, event, commands):
        if isinstance(event, Lost | Joined):
            self.out.pop(event.worker, None)
        for command in commands:
            match command:
                case Compute(worker, _, _, minibatch):
                    self.out[worker] = minibatch
                case Interrupt(worker):
                    del self.out[worker]
                case Accept(worker):
                    self.held.append(self.out.pop(worker))
                case Decision("lost", reason):
                    del self.out[int(reason.partition(":")[0].removeprefix("worker "))]
                case Drop(worker, _, _, reason) if reason == "too stale":
                    del self.out[worker]
                case Drop(worker, _, _, reason) if reason == "not finite":
                    self.discarded.append(self.out.pop(worker))
                case Apply():
                    self.applied += self.held
                    self.held = []


@parametrize_few("partitioned", [False, True], keep=1)
@given(data=st.data(), n=workers, steps=happenings)
def test_every_minibatch_of_an_epoch_is_used_exactly_once(partitioned, data, n, steps):
    per_epoch = data.draw(st.integers(1, 8))
    plan, known = data.draw(plans(n))
    ahead = 0 if partitioned else data.draw(st.integers(0, 3))
    minibatches = MinibatchSampler(n, per_epoch=per_epoch, partitioned=partitioned, ahead=ahead)
    checker = InvariantChecker(coordinator(plan, n, minibatches=minibatches), n, known)
    dealt = Dealt(checker.commands[0])
    handle = checker.driven.handle

    def handle_and_see(event):
        commands = handle(event)
        dealt.see(event, commands)
        return commands

    checker.driven.handle = handle_and_see
    for what, number in steps:
        happen(checker, what, number)
    reserved = [each for worker in range(1, MOST_WORKERS) for each in minibatches.upcoming(worker)]
    assert all(worker in checker.live for worker in range(MOST_WORKERS) if minibatches.upcoming(worker))
    minibatches.assign_shards([0])  # who now takes what came back, and then new ones, of all shards in turn
    shards = n if partitioned else 1
    undealt = [minibatches.next(0) for _ in range(shards * (len(checker.commands) + per_epoch + MOST_WORKERS))]
    undealt += [*minibatches.upcoming(0), *reserved]
    everything = [*dealt.applied, *dealt.held, *dealt.discarded, *dealt.out.values(), *undealt]
    for shard in range(shards):
        numbers = sorted(epoch * per_epoch + number for part, epoch, number, *_ in everything if part == shard)
        assert numbers == list(range(len(numbers))), "each exactly once, none left out"


@pytest.mark.parametrize("protocol", [asp(), backup(k=1), k_sync(k=2), pull(k=3), k_batch_async(k=5)])
def test_the_shard_of_a_lost_worker_is_redistributed_until_it_rejoins(protocol):
    checker = InvariantChecker(
        coordinator(protocol, 3, minibatches=MinibatchSampler(3, per_epoch=4, partitioned=True)), 3, [protocol]
    )
    dealt = Dealt(checker.commands[0])
    dealt.see(Lost(0, 1, ""), checker.lose(1))
    owners = {shard: set() for shard in range(3)}

    def rounds(count):
        for _ in range(count):
            for worker in list(checker.in_flight):
                if worker in checker.in_flight:
                    dealt.see(None, checker.arrive(worker))
                for computing, minibatch in dealt.out.items():
                    owners[minibatch.shard].add(computing)

    rounds(8)
    assert owners[1] == {0}, "the first of those that are there"
    assert (owners[0], owners[2]) == ({0}, {2})
    dealt.see(Joined(0, 1), checker.join(1))
    for worker in (0, 2):  # who may still be computing on the shard of worker 1
        dealt.see(None, checker.arrive(worker) if worker in checker.in_flight else [])
    rounds(1)
    owners[1].clear()
    rounds(8)
    assert owners[1] == {1}


def test_without_requeue_dropped_minibatches_are_not_repeated():
    minibatches = MinibatchSampler(1, per_epoch=3, partitioned=False, requeue=False)
    first = minibatches.next(0)
    minibatches.put_back(first)
    assert [minibatches.next(0).number for _ in range(3)] == [1, 2, 0]


def test_with_replacement_minibatches_have_no_number():
    minibatches = MinibatchSampler(2, per_epoch=None, partitioned=True)
    assert [minibatches.next(worker) for worker in (0, 1)] == [Minibatch(0, None, None), Minibatch(1, None, None)]
