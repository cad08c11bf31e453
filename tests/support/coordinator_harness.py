"""Two ways to drive a coordinator without an engine: by a script that is read like a transcript, and at random."""

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from itertools import pairwise
from math import nan

from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.settings import CoordinatorSettings
from paceline.coordinator.updates import LATE_RETURN, PROBE, STALE
from paceline.core.events import (
    NOT_FINITE,
    OLD_DRAW,
    AbortRun,
    Accept,
    Apply,
    Arrival,
    Compute,
    Decision,
    Drop,
    EndRun,
    Evaluate,
    Evaluated,
    Interrupt,
    Joined,
    Lost,
    Outcome,
    RestartWorker,
    SetTimer,
    Step,
    Timer,
    UpdateApplied,
)
from paceline.core.stop import Stop as StopRule
from paceline.policies.controllers.base import Controller
from paceline.protocols.protocol import as_plan

SETTINGS = {each.name for each in fields(CoordinatorSettings)}


def coordinator(plan, n, **knobs):
    """Return a coordinator of n workers that goes on for ever, unless told otherwise."""
    total = knobs.pop("total", None)
    stop = StopRule(**knobs.pop("stop", {"updates": 10**9}))
    per_epoch = knobs.get("per_epoch")
    plan = as_plan(plan).checked(n, total=total or stop.workload(per_epoch), per_epoch=per_epoch)
    timeout_s = knobs.pop("worker_timeout_s", None)
    settings = CoordinatorSettings(**{name: knobs.pop(name) for name in SETTINGS & knobs.keys()})
    parts = {"failure_detector": FailureDetector(timeout_s), **knobs}
    return Coordinator(plan, workers=n, stop=stop, settings=settings, **parts)


@dataclass(frozen=True)
class Scripted(Controller):
    """Answers the i-th question of a kind with the i-th entry of its script; its state counts the questions."""

    open: tuple = ()
    arrival: tuple = ()
    timer: tuple = ()
    end: tuple = ()
    seen: list = field(default_factory=list)

    def begin(self, n):
        return {"open": 0, "arrival": 0, "timer": 0, "end": 0}

    def decide(self, state, observation):
        self.seen.append(observation)
        answers, i = getattr(self, observation.trigger), state[observation.trigger]
        answer = answers[i] if i < len(answers) else ()
        return state | {observation.trigger: i + 1}, answer


# --- by script --------------------------------------------------------------------------------------------


def play(plan, n, script, **knobs):
    """Play the events of a script and check that the commands are those of the script, all of them, in order.

    A line is an event, a bar and commands with semicolons between; a line without event goes on with commands.
    `w2.1` is the first piece of work of worker 2. An event happens one second after the one before, unless it
    says when. Unless the script begins with `begin`, the run begins with work for everybody. Wakes, and the timeout
    on silent workers, are compared only in a script that has one: elsewhere they would be in the way.

        w0.1 arrives       | accept w0.1; apply v1 = w0.1 (quorum of 1 reached)
                           | compute w0.2 on v1
        at 7.5 w1.1 arrives| accept w1.1 stale 1; ...
    """
    driven = coordinator(plan, n, **knobs)
    lines = _read(script)
    if lines[0][0] != "begin":
        driven.begin()
    now, actual, wanted = 0.0, [], []
    for event, commands in lines:
        if event == "begin":
            answer = driven.begin()
        else:
            now, what = _event(event, now)
            answer = driven.handle(what)
        told = "; ".join(_told(command) for command in answer if _is_compared(command, script))
        actual += [event, *(f"    | {command}" for command in told.split("; ") if command)]
        wanted += [event, *(f"    | {command}" for command in commands)]
    assert actual == wanted
    return driven


def _read(script):
    lines = []
    for line in filter(str.strip, script.splitlines()):
        event, _, commands = line.partition("|")
        if event.strip():
            lines.append((" ".join(event.split()), []))
        lines[-1][1].extend(told.strip() for told in commands.split("; ") if told.strip())
    return lines


def _event(text, now):
    at, what = re.fullmatch(r"(?:at (\S+) )?(.*)", text).groups()
    now = float(at) if at else now + 1
    if found := re.fullmatch(r"w(\d+)\.(\d+) arrives(?: loss=(\S+))?( not finite)?", what):
        worker, draw, loss, broken = found.groups()
        return now, Arrival(now, int(worker), int(draw), loss=float(loss or nan), finite=not broken)
    if found := re.fullmatch(r"w(\d+) (joins|is lost)", what):
        return now, Joined(now, int(found[1])) if found[2] == "joins" else Lost(now, int(found[1]), "unplugged")
    if found := re.fullmatch(r"v(\d+) evaluated accuracy=(\S+)", what):
        return now, Evaluated(now, int(found[1]), {"accuracy": float(found[2])})
    if found := re.fullmatch(r"quit: (.*)", what):
        return now, AbortRun(now, Outcome.FAILED, found[1])
    assert what == "timer", f"no event: {text}"
    return now, Timer(now)


def _is_compared(command, script):
    if isinstance(command, Decision) and command.kind == "worker_timeout":
        return "worker_timeout: " in script
    return not isinstance(command, SetTimer) or "wake" in script


def _told(command):
    match command:
        case Compute(worker, version, draw, None):
            return f"compute w{worker}.{draw} on v{version}"
        case Compute(worker, version, draw, (shard, epoch, number)):
            return f"compute w{worker}.{draw} on v{version} shard {shard} epoch {epoch} number {number}"
        case Interrupt(worker, draw):
            return f"interrupt w{worker}.{draw}"
        case RestartWorker(worker):
            return f"replace w{worker}"
        case Accept(worker, draw, staleness):
            return f"accept w{worker}.{draw}" + (f" stale {staleness}" if staleness else "")
        case Drop(worker, draw, staleness, reason):
            return f"drop w{worker}.{draw}" + (f" stale {staleness}" if staleness else "") + f" ({reason})"
        case Apply(version, gradients, scale, reason):
            made_of = " + ".join(f"w{accepted.worker}.{accepted.draw}" for accepted in gradients)
            return f"apply v{version} = {made_of}" + (f" x {scale:g}" if scale != 1 else "") + f" ({reason})"
        case Evaluate(version):
            return f"evaluate v{version}"
        case SetTimer(at_s):
            return f"wake at {at_s:g}"
        case Decision(kind, reason):
            return f"{kind}: {reason}"
        case EndRun(outcome, reason):
            return f"stop {outcome}: {reason}"
    raise AssertionError(command)


# --- at random --------------------------------------------------------------------------------------------


class Watch:
    """Hands events to a coordinator and checks each command against what must hold under every protocol.

    Args:
        driven: the coordinator.
        n: its workers.
        protocols: all that may come into force, each under a name of its own.
    """

    def __init__(self, driven, n, protocols):
        self.driven = driven
        self.protocols = {protocol.name: protocol for protocol in protocols}
        self.now = 0.0
        self.version = 0
        self.live = set(range(n))
        self.aside = set()
        self.probed = {}  # worker set aside -> version that it computes on, for nobody
        self.draws = Counter()
        self.flying = {}  # worker -> version that it computes on, in the order of being given work
        self.held = []
        self.contributors = set()  # live workers that have a gradient in the open update
        self.deliveries = {}  # of the live workers since the protocol came into force
        self.updates = []
        self.stopped = None
        self.commands = []
        self._joined_since_update = set()
        self._newcomers_of_update = set()
        self.take(None, driven.begin())

    # events

    def arrive(self, worker, draw=None, dt=1.0, finite=True):
        self.now += dt
        draw = self.draws[worker] if draw is None else draw
        current = worker in self.flying and draw == self.draws[worker]
        if current:
            self.deliveries[worker] += 1
        was_live = worker in self.live  # a controller may take it back on the spot
        wanted = self.driven.would_accept(worker, draw)
        loss, squared_norm = 2 / (1 + self.version), 1 + worker / 10
        event = Arrival(self.now, worker, draw, loss=loss, squared_norm=squared_norm, finite=finite)
        commands = self.take(event, self._handled(event))
        fate = next(command for command in commands if isinstance(command, Accept | Drop))
        assert isinstance(fate, Accept if wanted and finite else Drop)
        if not current and was_live:
            assert commands == [fate]
            assert fate.reason == OLD_DRAW
        return commands

    def lose(self, worker):
        self._leave(worker)
        self._not_aside(worker)
        return self._plain(Lost, worker, "scripted")

    def join(self, worker):
        self._leave(worker)
        self._not_aside(worker)
        self._enter(worker)
        return self._plain(Joined, worker)

    def timer(self, dt=1.0):
        self.now += dt
        return self._plain(Timer)

    def _plain(self, kind, *what):
        event = kind(self.now, *what)
        return self.take(event, self._handled(event))

    def _handled(self, event):
        """Hand an event in, and tell the steps that are asked for."""
        commands = self.driven.handle(event)
        asked = [command for command in commands if isinstance(command, Apply) and command.measure]
        while asked:
            assert commands[-1] == asked[-1], "nothing is decided before the step is told"
            [update] = asked
            step = Step(squared_norm=0.9, progress=0.09, squared_step=0.009, learning_rate=0.1, next_learning_rate=0.1)
            following = self.driven.handle(UpdateApplied(self.now, update.version, step))
            asked = [command for command in following if isinstance(command, Apply) and command.measure]
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
            assert not self.stopped, "nothing is told after the stop"
            getattr(self, f"_{type(command).__name__.lower()}")(event, command)
        if not self.stopped:
            self._check_rest()
        return commands

    def _compute(self, event, command):
        worker = command.worker
        if worker in self.aside:
            self._probe(command)
            return
        assert worker in self.live
        assert worker not in self.flying, "one gradient in flight"
        assert command.version == self.version, "work is given on the newest version"
        assert command.draw == self.draws[worker] + 1
        if self.protocol.refill == "update":
            assert worker not in self.contributors, "who has contributed waits for the update"
        assert self.deliveries[worker] - self._fewest() <= self.protocol.max_lead
        self.draws[worker] = command.draw
        self.flying[worker] = command.version

    def _interrupt(self, event, command):
        assert command.draw == self.draws[command.worker]
        if self.probed.pop(command.worker, None) is not None:
            assert command.worker in self.live, "a probe is interrupted where its worker is taken back"
            return
        staleness = self.version - self.flying.pop(command.worker)
        if command.worker not in self.aside:
            assert self.protocol.on_update == "interrupt" or command.worker in self._newcomers_of_update
            assert staleness > self.protocol.max_staleness, "only work that could not be accepted is interrupted"

    def _accept(self, event, command):
        assert (command.worker, command.draw) == (event.worker, event.draw)
        assert command.draw == self.draws[command.worker]
        assert command.staleness == self.version - self.flying.pop(command.worker)
        assert command.staleness <= self.protocol.max_staleness
        assert event.finite
        self.held.append(command)
        self.contributors.add(command.worker)

    def _drop(self, event, command):
        assert (command.worker, command.draw) == (event.worker, event.draw)
        match command.reason:
            case "too stale":
                assert command.reason == STALE
                assert self.version - self.flying.pop(command.worker) > self.protocol.max_staleness
            case "not finite":
                assert command.reason == NOT_FINITE
                assert not event.finite
                del self.flying[command.worker]
            case "its worker had been declared lost":
                assert command.reason == LATE_RETURN
                assert command.worker not in self.live
                self._not_aside(command.worker)
                self._enter(command.worker)
            case "only a probe of its worker":
                assert command.reason == PROBE
                assert command.staleness == self.version - self.probed.pop(command.worker)
            case reason:
                assert reason == OLD_DRAW
                assert command.draw < self.draws[command.worker] or command.worker not in self.flying

    def _apply(self, event, command):
        assert command.version == self.version + 1
        assert list(command.gradients) == self.held, "every accepted gradient, once, in order of arrival"
        assert self.held, "no empty update"
        self.version += 1
        self.updates.append(command)
        self.held = []
        self.contributors.clear()
        self._newcomers_of_update = self._joined_since_update
        self._joined_since_update = set()

    def _decision(self, event, command):
        subject, _, _ = command.reason.partition(":")
        if command.kind == "protocol":
            self.protocol = self.protocols[subject]
            self.deliveries = dict.fromkeys(self.live, 0)
        elif command.kind == "set_aside":
            self._set_aside(int(subject.removeprefix("worker ")))
        elif command.kind == "take_back" and (worker := int(subject.removeprefix("worker "))) in self.aside:
            self.aside.remove(worker)  # a probe is interrupted next
            self._enter(worker)
        elif command.kind == "lost":
            self._leave(int(subject.removeprefix("worker ")))

    def _probe(self, command):
        worker = command.worker
        assert worker not in self.probed, "one probe at a time"
        assert (command.version, command.draw) == (self.version, self.draws[worker] + 1)
        assert command.minibatch is None, "nothing that has to be used is dealt out for a probe"
        self.draws[worker] = command.draw
        self.probed[worker] = command.version

    def _restartworker(self, event, command):
        assert command.worker in self.live | self.aside

    def _not_aside(self, worker):
        self.aside.discard(worker)
        self.probed.pop(worker, None)

    def _set_aside(self, worker):
        assert self.live != {worker}, "the last one stays"
        if worker in self.live:
            version = self.flying.get(worker)
            self._leave(worker)
            self.aside.add(worker)
            if version is not None:
                self.flying[worker] = version  # until its interrupt, which comes next

    def _settimer(self, event, command):
        pass

    def _evaluate(self, event, command):
        assert command.version == self.version

    def _endrun(self, event, command):
        self.stopped = command

    def _check_rest(self):
        """Check the state between two events."""
        assert set(self.flying) <= self.live
        assert set(self.probed) <= self.aside
        assert self.flying or not self.live, "never stalls: somebody computes"
        able = set(self.flying) - self._joined_since_update
        assert able or not self.held, "held gradients wait for somebody who can still contribute"
        versions = list(self.flying.values())
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
        self.flying.pop(worker, None)
        self.contributors.discard(worker)

    def _fewest(self):
        return min((self.deliveries[worker] for worker in self.live), default=getattr(self, "_last_fewest", 0))


def run(watch, duration_s, updates):
    """Let every worker deliver what it was given after duration_s(worker, draw), as an engine would."""
    heap, now, sequence, given = [], 0.0, 0, watch.commands[-1]
    while len(watch.updates) < updates:
        for command in given:
            if isinstance(command, Compute):
                sequence += 1
                heappush(heap, (now + duration_s(command.worker, command.draw), sequence, command[0], command.draw))
        now, _, worker, draw = heappop(heap)
        given = []
        if worker in watch.flying and draw == watch.draws[worker]:
            given = watch.arrive(worker, draw, dt=now - watch.now)
    return watch
