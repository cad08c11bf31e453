"""Naive coordinator: the rules of the design page without optimizations, timeouts and controllers."""

from dataclasses import dataclass
from math import inf

from paceline.core.events import Accept, Apply, Arrival, Compute, Drop, Interrupt, Joined


@dataclass
class Worker:
    live: bool = False
    version: int | None = None  # version of its task, None when idle
    draw: int = 0
    accepted: int = 0  # its newest accepted draw
    since: int = 0  # sequence number of its last change between idle and busy
    deliveries: int = 0  # gradients since the phase began
    contributed: bool = False  # whether it has contributed to the open update
    counts: bool = True  # False until the next update for a worker that joined


class NaiveCoordinator:
    """Coordinator of phases, pairs of a protocol and the version at which it ends."""

    def __init__(self, phases, n):
        self.phases = list(phases)
        self.protocol = self.phases[0][0]
        self.version = 0
        self.workload = 0  # gradients in updates
        self.sequence = 0
        self.held = []
        self.workers = [Worker(live=True, since=i - n) for i in range(n)]
        self.fewest = 0

    def begin(self):
        self.commands = []
        self.refill()
        return self.commands

    def handle(self, event):
        self.commands = []
        while event.worker >= len(self.workers):
            self.workers.append(Worker())
        worker = self.workers[event.worker]
        self.sequence += 1
        if isinstance(event, Arrival):
            if not worker.live or worker.version is None or event.draw != worker.draw:
                self.commands.append(Drop(worker=event.worker, draw=event.draw, staleness=0, reason="an old draw"))
                return self.commands
            self.deliver(event, worker)
        elif isinstance(event, Joined):
            self.workers[event.worker] = Worker(
                live=True,
                draw=worker.draw,
                accepted=worker.accepted,
                since=self.sequence,
                deliveries=self.lowest(without=worker),
                contributed=worker.contributed,
                counts=False,
            )
        else:
            worker.live = False
            worker.version = None
        self.go_on()
        return self.commands

    def deliver(self, event, worker):
        staleness = self.version - worker.version
        worker.version = None
        worker.since = self.sequence
        worker.deliveries += 1
        if not event.measured.finite or staleness > self.protocol.max_staleness:
            self.commands.append(Drop(worker=event.worker, draw=event.draw, staleness=staleness, reason="rejected"))
        else:
            accepted = Accept(worker=event.worker, draw=event.draw, staleness=staleness, samples=event.measured.samples)
            self.commands.append(accepted)
            self.held.append(accepted)
            worker.contributed = True
            worker.accepted = event.draw

    def go_on(self):
        """Make an update if min(K, accepted + live workers that can still contribute) gradients are accepted."""
        quorum = inf if self.protocol.quorum == "all" else self.protocol.quorum
        if self.held and (len(self.held) >= quorum or not self.able()):
            self.update()
        self.refill()

    def able(self):
        """Return the workers that can still contribute; for "all", those without a gradient in this update."""
        waits_for_all = self.protocol.quorum == "all"
        return [
            worker
            for worker in self.workers
            if worker.live
            and worker.counts
            and (worker.version is not None or self.may_start(worker))
            and not (waits_for_all and worker.contributed)
        ]

    def may_start(self, worker):
        waits_for_the_update = self.protocol.refill == "update" and worker.contributed
        return not waits_for_the_update and worker.deliveries - self.lowest() <= self.protocol.max_lead

    def lowest(self, without=None):
        counts = [worker.deliveries for worker in self.workers if worker.live and worker is not without]
        self.fewest = min(counts, default=self.fewest)
        return self.fewest

    def refill(self):
        """Give tasks to workers in the order of (time, sequence number)."""
        for worker in self.in_order(idle=True):
            if self.may_start(worker):
                self.give(worker)

    def give(self, worker):
        self.sequence += 1
        worker.since = self.sequence
        worker.version = self.version
        worker.draw += 1
        self.commands.append(
            Compute(
                worker=self.number(worker),
                version=self.version,
                draw=worker.draw,
                minibatch=None,
                upcoming=(),
                workload=self.workload,
                accepted=worker.accepted,
            )
        )

    def update(self):
        self.version += 1
        self.workload += len(self.held)
        self.commands.append(Apply(version=self.version, gradients=tuple(self.held), lr_scale=1.0, reason="complete"))
        self.held = []
        newcomers = [worker for worker in self.workers if not worker.counts]
        for worker in self.workers:
            worker.contributed = False
            worker.counts = True
        while self.phases[0][1] is not None and self.version >= self.phases[0][1]:
            self.phases.pop(0)
            self.protocol = self.phases[0][0]
            self.fewest = 0
            for worker in self.workers:
                worker.deliveries = 0
        for worker in self.in_order(idle=False):
            may_be = self.protocol.on_update == "interrupt" or worker in newcomers
            if may_be and self.version - worker.version > self.protocol.max_staleness:
                self.commands.append(Interrupt(self.number(worker), worker.draw))
                self.sequence += 1
                worker.since = self.sequence
                worker.version = None

    def number(self, worker):
        return next(i for i, other in enumerate(self.workers) if other is worker)

    def in_order(self, idle):
        chosen = [worker for worker in self.workers if worker.live and (worker.version is None) == idle]
        return sorted(chosen, key=lambda worker: worker.since)


def told(commands):
    """Return the part of the commands that must be equal for both coordinators: all except scales and reasons."""
    kept = []
    for command in commands:
        match command:
            case Drop(worker, draw, staleness, reason):
                old = "finished after" in reason or "old draw" in reason
                kept.append(("drop", worker, draw, inf if old else staleness))
            case Apply(version, gradients):
                kept.append(("apply", version, gradients))
            case Compute() | Interrupt() | Accept():
                kept.append((type(command).__name__, *command))
    return kept
