"""Invariants of a coordinator under every protocol, checked at each command."""

from collections import Counter
from heapq import heappop, heappush
from itertools import pairwise

from arrivals import arrival
from paceline.coordinator.admission import LATE_RETURN, PROBE, STALE
from paceline.core.events import (
    NOT_FINITE,
    OLD_DRAW,
    Accept,
    Apply,
    Arrival,
    Compute,
    Drop,
    Joined,
    Lost,
    Step,
    Timer,
    UpdateApplied,
)


class InvariantChecker:
    """Checker of a coordinator's commands against the invariants of every protocol.

    Args:
        driven: coordinator under test.
        n: number of its workers, >= 1.
        protocols: all protocols that may be in force, with distinct names.
    """

    def __init__(self, driven, n, protocols):
        self.driven = driven
        self.protocols = {protocol.name: protocol for protocol in protocols}
        self.protocol = None
        self.now = 0.0
        self.version = 0
        self.live = set(range(n))
        self.excluded = set()
        self.probed = {}  # excluded worker -> version of its probe
        self.draws = Counter()
        self.in_flight = {}  # worker -> version that it computes on, in the order of assignment
        self.works = {}  # newest work of each worker
        self.held = []
        self.contributors = set()  # live workers that have a gradient in the open update
        self.deliveries = {}  # of the live workers since the phase began or the protocol changed
        self.updates = []
        self.stopped = None
        self.commands = []
        self._joined_since_update = set()
        self._joined_before_update = set()
        self.take(None, driven.begin())

    # events

    def arrive(self, worker, draw=None, dt=1.0, finite=True):
        self.now += dt
        draw = self.draws[worker] if draw is None else draw
        current = worker in self.in_flight and draw == self.draws[worker]
        if current:
            self.deliveries[worker] += 1
        was_live = worker in self.live  # a controller may readmit it at once
        wanted = self.driven.would_accept(worker, draw)
        loss, squared_norm = 2 / (1 + self.version), 1 + worker / 10
        event = arrival(self.now, worker, draw, loss=loss, squared_norm=squared_norm, finite=finite)
        commands = self.take(event, self._handled(event))
        outcome = next(command for command in commands if isinstance(command, Accept | Drop))
        assert isinstance(outcome, Accept if wanted and finite else Drop)
        if not current and was_live:
            assert commands == [outcome]
            assert outcome.reason == OLD_DRAW
        return commands

    def lose(self, worker):
        self._leave(worker)
        self._not_excluded(worker)
        return self._plain(Lost, worker, "scripted")

    def join(self, worker):
        self._leave(worker)
        self._not_excluded(worker)
        self._enter(worker)
        return self._plain(Joined, worker)

    def timer(self, dt=1.0):
        self.now += dt
        return self._plain(Timer)

    def _plain(self, kind, *what):
        event = kind(self.now, *what)
        return self.take(event, self._handled(event))

    def _handled(self, event):
        """Handle an event and report the requested steps."""
        commands = self.driven.handle(event)
        requested = [command for command in commands if isinstance(command, Apply) and command.measure]
        while requested:
            assert commands[-1] == requested[-1], "no decision precedes the measured step"
            [update] = requested
            step = Step(squared_norm=0.9, progress=0.09, squared_step=0.009, learning_rate=0.1, next_learning_rate=0.1)
            following = self.driven.handle(UpdateApplied(self.now, update.version, step))
            requested = [command for command in following if isinstance(command, Apply) and command.measure]
            commands = [*commands, *following]
        return commands

    # commands

    def take(self, event, commands):
        self.commands.append(commands)
        if self.stopped:
            assert commands == []
            return commands
        arrivals = [command for command in commands if isinstance(command, Accept | Drop)]
        assert len(arrivals) == isinstance(event, Arrival)
        for command in commands:
            assert not self.stopped, "no command follows the stop"
            getattr(self, f"_{type(command).__name__.lower()}")(event, command)
        if not self.stopped:
            self._check_rest()
        return commands

    def _compute(self, event, command):
        worker = command.worker
        if worker in self.excluded:
            self._probe(command)
            return
        assert worker in self.live
        assert worker not in self.in_flight, "one gradient in flight"
        assert command.version == self.version, "a task starts on the newest version"
        assert command.draw == self.draws[worker] + 1
        if self.protocol.refill == "update":
            assert worker not in self.contributors, "a contributor waits for the update"
        assert self.deliveries[worker] - self._fewest() <= self.protocol.max_lead
        self.draws[worker] = command.draw
        self.in_flight[worker] = command.version
        self.works[worker] = command.minibatch

    def _interrupt(self, event, command):
        assert command.draw == self.draws[command.worker]
        if self.probed.pop(command.worker, None) is not None:
            assert command.worker in self.live, "a probe is interrupted when its worker is readmitted"
            return
        staleness = self.version - self.in_flight.pop(command.worker)
        if isinstance(event, Arrival) and self.protocol.refill == "share":
            assert self.works[command.worker] == self.works[event.worker], "the copy of a lease that has arrived"
        elif command.worker not in self.excluded:
            assert self.protocol.on_update == "interrupt" or command.worker in self._joined_before_update
            assert staleness > self.protocol.max_staleness, "only tasks that are too stale are interrupted"

    def _accept(self, event, command):
        assert (command.worker, command.draw) == (event.worker, event.draw)
        assert command.draw == self.draws[command.worker]
        assert command.staleness == self.version - self.in_flight.pop(command.worker)
        assert command.staleness <= self.protocol.max_staleness
        assert event.measured.finite
        self.held.append(command)
        self.contributors.add(command.worker)

    def _drop(self, event, command):
        assert (command.worker, command.draw) == (event.worker, event.draw)
        match command.reason:
            case "too stale":
                assert command.reason == STALE
                assert self.version - self.in_flight.pop(command.worker) > self.protocol.max_staleness
            case "not finite":
                assert command.reason == NOT_FINITE
                assert not event.measured.finite
                del self.in_flight[command.worker]
            case "its worker had been declared lost":
                assert command.reason == LATE_RETURN
                assert command.worker not in self.live
                self._not_excluded(command.worker)
                self._enter(command.worker)
            case "only a probe of its worker":
                assert command.reason == PROBE
                assert command.staleness == self.version - self.probed.pop(command.worker)
            case reason:
                assert reason == OLD_DRAW
                assert command.draw < self.draws[command.worker] or command.worker not in self.in_flight

    def _apply(self, event, command):
        assert command.version == self.version + 1
        assert list(command.gradients) == self.held, "every accepted gradient, once, in order of arrival"
        assert self.held, "no empty update"
        self.version += 1
        self.updates.append(command)
        self.held = []
        self.contributors.clear()
        self._joined_before_update = self._joined_since_update
        self._joined_since_update = set()

    def _decision(self, event, command):
        subject, _, _ = command.reason.partition(":")
        if command.kind == "protocol":
            before, self.protocol = self.protocol, self.protocols[subject]
            if self.protocol != before or command.reason.endswith(("reached", "the run begins")):  # a phase begins
                self.deliveries = dict.fromkeys(self.live, 0)
        elif command.kind == "set_aside":
            self._exclude(int(subject.removeprefix("worker ")))
        elif command.kind == "take_back" and (worker := int(subject.removeprefix("worker "))) in self.excluded:
            self.excluded.remove(worker)  # a probe is interrupted next
            self._enter(worker)
        elif command.kind == "lost":
            self._leave(int(subject.removeprefix("worker ")))

    def _probe(self, command):
        worker = command.worker
        assert worker not in self.probed, "one probe at a time"
        assert (command.version, command.draw) == (self.version, self.draws[worker] + 1)
        assert command.minibatch is None, "a probe has no numbered minibatch"
        self.draws[worker] = command.draw
        self.probed[worker] = command.version

    def _restartworker(self, event, command):
        assert command.worker in self.live | self.excluded

    def _not_excluded(self, worker):
        self.excluded.discard(worker)
        self.probed.pop(worker, None)

    def _exclude(self, worker):
        assert self.live != {worker}, "the last worker is never excluded"
        if worker in self.live:
            version = self.in_flight.get(worker)
            self._leave(worker)
            self.excluded.add(worker)
            if version is not None:
                self.in_flight[worker] = version  # until its interrupt, which comes next

    def _settimer(self, event, command):
        pass

    def _evaluate(self, event, command):
        assert command.version == self.version

    def _endrun(self, event, command):
        self.stopped = command

    def _check_rest(self):
        """Check the state between two events."""
        assert set(self.in_flight) <= self.live
        assert set(self.probed) <= self.excluded
        assert self.in_flight or not self.live, "a live worker computes"
        able = set(self.in_flight)
        if self.protocol.refill != "share":
            able -= self._joined_since_update
        assert able or not self.held, "held gradients wait for a worker that can contribute"
        versions = list(self.in_flight.values())
        assert all(a <= b for a, b in pairwise(versions))

    # helpers

    def _enter(self, worker):
        self.deliveries[worker] = self._fewest()
        self.live.add(worker)
        self._joined_since_update.add(worker)

    def _leave(self, worker):
        if worker in self.live:
            if len(self.live) == 1:
                self._last_fewest = self.deliveries[worker]
            self.live.remove(worker)
            del self.deliveries[worker]
            self._joined_since_update.discard(worker)
        self.in_flight.pop(worker, None)
        self.contributors.discard(worker)

    def _fewest(self):
        return min((self.deliveries[worker] for worker in self.live), default=getattr(self, "_last_fewest", 0))


def run(checker, duration_s, updates):
    """Deliver every task after duration_s(worker, draw), as an engine does, until `updates` updates."""
    heap, now, sequence, started = [], 0.0, 0, checker.commands[-1]
    while len(checker.updates) < updates:
        for command in started:
            if isinstance(command, Compute):
                sequence += 1
                heappush(heap, (now + duration_s(command.worker, command.draw), sequence, command[0], command.draw))
        now, _, worker, draw = heappop(heap)
        started = []
        if worker in checker.in_flight and draw == checker.draws[worker]:
            started = checker.arrive(worker, draw, dt=now - checker.now)
    return checker
