"""Attached loops as threads of this process, which reach their server in memory."""

import threading
from dataclasses import replace

from machine_speed import scaled
from memory_transport import MemoryNetwork, MemoryTransport
from paceline import Stop, Torchrun
from paceline.catalogue.parser import parse_plan
from paceline.clusters.launch_env import LaunchEnv
from paceline.engines.distributed import Host, WholeProcess
from paceline.run.session import take_part
from paceline.run.train import run_session
from paceline.user_loop.data.loop_data import UserLoop
from paceline.user_loop.data.loop_digests import digests_of
from paceline.user_loop.rank_part import RankPart
from paceline.user_loop.run_end import end_of
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.server.description import describe, first_of_coordinator, make_job, tensors_of
from paceline.user_loop.server.optimizer_state import load_named_state, named_state, state_reader
from paceline.user_loop.server.server_process import RequestedEnd
from paceline.user_loop.shared_run import SharedRun
from paceline.user_loop.step_policies import RankSteps, ServerSteps
from paceline.user_loop.worker.exchange import Exchange, LoopEnd
from paceline.user_loop.worker.loop_lifecycle import LoopLifecycle
from paceline.user_loop.worker.loop_replicas import LoopReplicas
from paceline.user_loop.worker.optimizer_copy import copies_of, copies_of_pickle, pickled_by_value
from rank_threads import LIMIT_S, TOKEN

START_TIMEOUT_S = scaled(10.0)


class ServerLifecycle(WholeProcess):
    """Lifecycle of the server, which is a thread here."""

    def set_num_threads(self, count):
        pass


class ThreadPart(RankPart):
    """Part of a rank, which reaches the others in memory; a scripted death ends its connections.

    Args:
        ranks: all ranks.
        rank: number of this one.
        loop: parts of its loop.
    """

    def __init__(self, ranks, rank, loop):
        self._ranks = ranks
        self._rank = rank
        self._loop = loop
        self._transport = MemoryTransport(ranks.network)
        self.ranks = ranks.count // ranks.group_size
        self.exchange = Exchange()
        self.lifecycle = LoopLifecycle(has_server=True)
        model, optimizer = loop.model, loop.optimizer
        read_copy = None if ranks.has_server else lambda: self.lifecycle.read_state()
        self.steps = RankSteps(optimizer) if ranks.steps_here else ServerSteps(optimizer, model, read_copy)
        is_summed_early = ranks.plan.counts_all and not ranks.has_server
        replicas = LoopReplicas(self.exchange, loop, is_summed_early=is_summed_early)
        self.host = Host(
            lifecycle=self.lifecycle,
            make_replica=replicas,
            make_transport=self._make_transport,
            make_optimizer=None if self._describe().is_of_torch else copies_of(optimizer, model),
        )

    def config(self, stop):
        return self._config(stop, self._rank + 1)

    def start_server(self, stop):
        return None if self._rank else self._ranks.start_server(self._config(stop, 0), self._loop)

    def take_part(self, config):
        return LoopEnd(*take_part(config, self.host))

    def kill(self):
        """Let all its connections end now."""
        self._transport.kill()

    def _config(self, stop, number):
        tensors = first_of_coordinator(tensors_of(self._loop.model), 1 if number else self._ranks.group_size)
        job = make_job(self._describe(), tensors)
        return self._ranks.options.config(job, self._ranks.plan, self._ranks.cluster(number), stop)

    def _describe(self):
        return describe(self._loop, steps_here=self._ranks.steps_here)

    def _make_transport(self, cluster, security):
        self._transport.token = cluster.ranks.token
        return self._transport


class Killed(BaseException):
    """Rank that was killed.

    Attributes:
        is_restarted: whether it starts again.
    """

    def __init__(self, is_restarted):
        super().__init__()
        self.is_restarted = is_restarted


class ServerThread:
    """Server that is a thread here."""

    def __init__(self, serve, requested):
        self.result = self.read_state = self.end = None
        self._requested = requested
        self._thread = threading.Thread(target=self._run, args=[serve], daemon=True)
        self._thread.start()

    def _run(self, serve):
        try:
            session, self.result = serve(self)
            self.end = end_of(session, self.result)
        except BaseException as error:
            self.result = error

    def check(self, timeout_s=0.0):
        if isinstance(self.result, BaseException):
            raise self.result

    def end_run(self, outcome, reason):
        self._requested.end_run(outcome, reason)

    def stop(self, outcome, reason):
        self.end_run(outcome, reason)

    def state(self):
        return self.read_state()

    def wait(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        self.check()
        return self.state()


class AttachedThreads:
    """Ranks with a loop each.

    Args:
        count: number of ranks.
        make_parts: returns model, optimizer and loader of a rank.
        protocol: protocol as text.
        server: whether a server makes the steps, else each rank.
        group_size: ranks of each worker, which have a shard each.
        settings: `accumulate`, `clip_norm`, `stop`, and the options of the run.
    """

    def __init__(self, count, make_parts, protocol, *, server=True, group_size=1, **settings):
        self.has_server = server
        self.group_size = group_size
        given = dict(settings)
        self._stop = given.pop("stop", None)
        self._accumulate = given.pop("accumulate", 1)
        self._clip_norm = given.pop("clip_norm", None)
        self._returns = given.pop("returns", False)
        self._make_parts = make_parts
        self.network = MemoryNetwork()
        self.count = count
        self.plan = parse_plan(protocol)
        self.options = RunOptions.of({"seed": 1, **given})
        self.steps_here = self.plan.local_steps is not None
        self.server = None
        self.parts = [make_parts() for _ in range(count)]
        self._digests = [digests_of(model, loader, self.plan) for model, _, loader in self.parts]
        self._of_ranks = [None] * count
        self.answers = [None] * count

    def run(self, loop):
        """Call `loop(run, model, optimizer)` in the thread of each rank, and return what it returns or raises."""
        threads = [threading.Thread(target=self._loop, args=[loop, rank], daemon=True) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), f"a loop does not end: {self.answers}"
        if self.server is not None:
            try:
                self.server.wait()
            except Exception as error:
                error.add_note(f"the ranks: {self.answers}")
                raise
        return self.answers

    def run_well(self, loop):
        """Do as `run`, and raise what a loop raises."""
        for each in self.run(loop):
            if isinstance(each, Exception):
                raise each
        return self.answers

    def _loop(self, loop, rank):
        model, optimizer, _ = self.parts[rank]
        try:
            with self._attach(rank) as run:
                self.answers[rank] = loop(run, model, optimizer)
        except Killed as killed:
            self.answers[rank] = killed
            if killed.is_restarted:
                self.parts[rank] = self._make_parts()
                self._loop(loop, rank)
        except BaseException as error:
            self.answers[rank] = error

    def kill(self, rank, *, is_restarted):
        """End the connections of a rank and its loop, as the end of its process does."""
        self._of_ranks[rank].kill()
        raise Killed(is_restarted)

    def _attach(self, rank):
        model, optimizer, loader = self.parts[rank]
        loop = UserLoop(
            model=model,
            optimizer=optimizer,
            loader=loader,
            accumulate=self._accumulate,
            clip_norm=self._clip_norm,
            digests=self._digests[rank],
            group_size=self.group_size,
        )
        part = self._of_ranks[rank] = ThreadPart(self, rank, loop)
        return SharedRun(loop, Stop.parse(self._stop) if self._stop else None, part, returns=self._returns)

    def start_server(self, config, loop):
        """Start the server with the state of the optimizer of a loop."""
        first = {} if self.steps_here or self.group_size > 1 else named_state(loop.optimizer, loop.model)
        is_sent = self.has_server and not self.steps_here and not describe(loop).is_of_torch
        sent = pickled_by_value(loop.optimizer, loop.model) if is_sent else b""
        requested = RequestedEnd()

        def make_transport(cluster, security):
            transport = MemoryTransport(self.network)
            transport.token = cluster.ranks.token
            return transport

        def serve_run(server):
            host = Host(
                lifecycle=ServerLifecycle(requested.make_signals),
                make_transport=make_transport,
                make_optimizer=copies_of_pickle(sent) if sent else None,
            )
            session, folder, resumption, policy = self.options.open_session(config, host)
            load_named_state(session.server.optimizer, session.model, first)
            server.read_state = dict if self.steps_here else state_reader(session.server)
            return session, run_session(session, folder, resumption, [], policy)

        self.server = ServerThread(serve_run, requested)
        return self.server

    def cluster(self, rank):
        """Return the launch settings of a process of the run, of which the server is rank 0."""
        ranks = LaunchEnv.from_environment(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.count + 1),
                "LOCAL_WORLD_SIZE": str(self.count + 1),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "PACELINE_TOKEN": TOKEN,
            }
        )
        ranks = replace(ranks, ranks_before=1)
        return Torchrun(
            server=self.has_server,
            group_size=self.group_size,
            worker_at_server=False,
            start_timeout_s=START_TIMEOUT_S,
            ranks=ranks,
        )
