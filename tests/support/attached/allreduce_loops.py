"""Attached loops without a server as threads of this process, which reach each other in memory."""

import threading
from dataclasses import replace

from machine_speed import scaled
from memory_transport import MemoryNetwork, MemoryTransport
from paceline import Stop, Torchrun
from paceline.catalogue.parser import parse_plan
from paceline.clusters.launch_env import LaunchEnv
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.data.loop_digests import digests_of
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.shared_run import SharedRun
from paceline.user_loop.worker.allreduce_part import AllReducePart
from paceline.user_loop.worker.loop_lifecycle import LoopLifecycle
from rank_threads import LIMIT_S, TOKEN, Killed

START_TIMEOUT_S = scaled(10.0)


class MortalLifecycle(LoopLifecycle):
    """Lifecycle of a rank whose scripted death ends its connections."""

    def __init__(self, transport):
        super().__init__(has_server=False)
        self._transport = transport
        self.fault_actions = {"die": self.die}

    def die(self):
        self._transport.kill()
        raise Killed


class AllReduceLoops:
    """Ranks with a loop each.

    Args:
        count: number of ranks.
        make_parts: returns model, optimizer and loader of a rank.
        protocol: protocol as text.
        torchrun: arguments of `Torchrun`.
        settings: `accumulate`, `clip_norm`, `stop`, and the options of rank 0.
    """

    def __init__(self, count, make_parts, protocol, torchrun=None, **settings):
        self._network = MemoryNetwork()
        self._count = count
        self._plan = parse_plan(protocol)
        self._torchrun = {"start_timeout_s": START_TIMEOUT_S, **(torchrun or {})}
        self._accumulate = settings.pop("accumulate", 1)
        self._clip_norm = settings.pop("clip_norm", None)
        self._returns = settings.pop("returns", False)
        self._stop = settings.pop("stop", None)
        self._callbacks = settings.pop("callbacks", ())
        self._options = RunOptions.of({"seed": 1, **settings})
        self._make_parts = make_parts
        self._threads = {}
        self.parts = [make_parts() for _ in range(count)]
        self._digests = [digests_of(model, loader, self._plan) for model, _, loader in self.parts]
        self.runs = [None] * count
        self.answers = [None] * count

    def run(self, loop):
        """Call `loop(run, model, optimizer)` in the thread of each rank, and return what it returns or raises."""
        for rank in range(self._count):
            self.start(rank, loop)
        return [self.end(rank) for rank in range(self._count)]

    def start(self, rank, loop):
        """Start a rank, or start it once more with a new model."""
        if rank in self._threads:
            self.parts[rank] = self._make_parts()
        self._threads[rank] = threading.Thread(target=self._loop, args=[loop, rank], daemon=True)
        self._threads[rank].start()

    def end(self, rank):
        """Return what the loop of a rank has returned or raised."""
        self._threads[rank].join(LIMIT_S)
        assert not self._threads[rank].is_alive(), f"a loop does not end: {self.answers}"
        return self.answers[rank]

    def _loop(self, loop, rank):
        model, optimizer, _ = self.parts[rank]
        try:
            with self._attach(rank) as run:
                self.runs[rank] = run
                self.answers[rank] = loop(run, model, optimizer)
        except BaseException as error:
            self.answers[rank] = error

    def _attach(self, rank):
        model, optimizer, loader = self.parts[rank]
        loop = UserLoop(
            model=model,
            optimizer=optimizer,
            loader=loader,
            accumulate=self._accumulate,
            clip_norm=self._clip_norm,
            digests=self._digests[rank],
        )
        part = AllReducePart(loop, self._plan, self._cluster(rank), self._options, self._callbacks)
        transport = MemoryTransport(self._network)

        def make_transport(cluster, security):
            transport.token = cluster.ranks.token
            return transport

        part.lifecycle = MortalLifecycle(transport)
        part.host = replace(part.host, lifecycle=part.lifecycle, make_transport=make_transport)
        return SharedRun(loop, Stop.parse(self._stop) if self._stop else None, part, returns=self._returns)

    def _cluster(self, rank):
        ranks = LaunchEnv.from_environment(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._count),
                "LOCAL_WORLD_SIZE": str(self._count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "PACELINE_TOKEN": TOKEN,
            }
        )
        return replace(Torchrun(ranks=ranks, **self._torchrun)).fitted_to(self._plan)
