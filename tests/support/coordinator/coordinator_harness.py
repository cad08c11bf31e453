"""A coordinator driven without an engine, by a script of events and the commands that answer them."""

import re
from dataclasses import dataclass, field, fields
from math import nan

from arrivals import arrival
from paceline.coordinator.coordinator import Coordinator
from paceline.coordinator.failure_detector import FailureDetector
from paceline.coordinator.settings import CoordinatorSettings
from paceline.core.events import (
    AbortRun,
    Accept,
    Apply,
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
    Timer,
)
from paceline.core.stop import Stop as StopRule
from paceline.policies.controllers.base import Controller
from paceline.protocols.plan_checks import checked_plan
from paceline.protocols.protocol import as_plan

SETTINGS = {each.name for each in fields(CoordinatorSettings)}


def coordinator(plan, n, **knobs):
    """Return a coordinator of n workers; by default it stops after 10**9 updates."""
    total = knobs.pop("total", None)
    stop = StopRule(**knobs.pop("stop", {"updates": 10**9}))
    per_epoch = knobs.get("per_epoch")
    plan = checked_plan(as_plan(plan), n, total=total or stop.workload(per_epoch), per_epoch=per_epoch)
    timeout_s = knobs.pop("worker_timeout_s", None)
    settings = CoordinatorSettings(**{name: knobs.pop(name) for name in SETTINGS & knobs.keys()})
    parts = {"failure_detector": FailureDetector(timeout_s), **knobs}
    return Coordinator(plan, workers=n, stop=stop, settings=settings, **parts)


@dataclass(frozen=True)
class Scripted(Controller):
    """Controller that returns the i-th entry of its script at the i-th call of a kind; its state counts the calls."""

    open: tuple = ()
    arrival: tuple = ()
    timer: tuple = ()
    end: tuple = ()
    seen: list = field(default_factory=list)

    def begin(self, n):
        return {"open": 0, "arrival": 0, "timer": 0, "end": 0}

    def decide(self, state, observation):
        self.seen.append(observation)
        script, i = getattr(self, observation.trigger), state[observation.trigger]
        actions = script[i] if i < len(script) else ()
        return state | {observation.trigger: i + 1}, actions


def play(plan, n, script, **knobs):
    """Play the events of a script and check that the commands are those of the script, all of them, in order.

    A line is an event, a bar and commands separated by semicolons; a line without an event adds commands.
    `w2.1` is the first task of worker 2. An event happens one second after the previous one, unless it has a
    time. Unless the script starts with `begin`, every worker has a task at the start. Timers and timeouts of
    silent workers are compared only in a script that has one.

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
        texts = "; ".join(_text(command) for command in answer if _is_compared(command, script))
        actual += [event, *(f"    | {command}" for command in texts.split("; ") if command)]
        wanted += [event, *(f"    | {command}" for command in commands)]
    assert actual == wanted
    return driven


def _read(script):
    lines = []
    for line in filter(str.strip, script.splitlines()):
        event, _, commands = line.partition("|")
        if event.strip():
            lines.append((" ".join(event.split()), []))
        lines[-1][1].extend(command.strip() for command in commands.split("; ") if command.strip())
    return lines


def _event(text, now):
    at, what = re.fullmatch(r"(?:at (\S+) )?(.*)", text).groups()
    now = float(at) if at else now + 1
    if found := re.fullmatch(r"w(\d+)\.(\d+) arrives(?: loss=(\S+))?( not finite| skipped| in a notice)?", what):
        worker, draw, loss, how = found.groups()
        about = {"finite": how not in {" not finite", " skipped"}, "skipped": how == " skipped"}
        about["unsent_s"] = 0.5 if how == " in a notice" else nan
        return now, arrival(now, int(worker), int(draw), loss=float(loss or nan), **about)
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


def _text(command):
    match command:
        case Compute(worker, version, draw, None):
            return f"compute w{worker}.{draw} on v{version}"
        case Compute(worker, version, draw, (shard, epoch, number, 1, (), 1)):
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
