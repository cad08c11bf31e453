"""Attached loops as threads of this process, which reach their server in memory."""

import threading
from dataclasses import replace

from machine_speed import scaled
from memory_transport import MemoryNetwork, MemoryTransport
from paceline import Stop, Torchrun
from paceline.catalogue.parser import parse_plan
from paceline.clusters.launch_env import LaunchEnv
from paceline.run.train import run_session
from paceline.user_loop.attached_run import AttachedRun
from paceline.user_loop.description import describe, make_job, tensors_of
from paceline.user_loop.local_steps_run import LocalStepsRun
from paceline.user_loop.loop_data import UserLoop
from paceline.user_loop.loop_local_steps import LocalStepsHost
from paceline.user_loop.loop_replica import Exchange, LoopHost
from paceline.user_loop.optimizer_state import load_named_state, named_state, state_reader
from paceline.user_loop.run_end import end_of
from paceline.user_loop.run_options import RunOptions
from paceline.user_loop.sample_digest import sample_digest
from paceline.user_loop.server_process import ServerHost
from rank_threads import LIMIT_S, TOKEN

START_TIMEOUT_S = scaled(10.0)


class Server(ServerHost):
    """Process of the server."""

    def __init__(self, network):
        super().__init__()
        self._network = network

    def transport(self, cluster, security):
        transport = MemoryTransport(self._network)
        transport.token = cluster.ranks.token
        return transport

    def set_num_threads(self, count):
        pass


class InMemory:
    """Process that reaches the others in memory; a scripted death ends its connections."""

    def __init__(self, network, *arguments):
        super().__init__(*arguments)
        self._own_transport = MemoryTransport(network)

    def transport(self, cluster, security):
        self._own_transport.token = cluster.ranks.token
        return self._own_transport

    def kill(self):
        """Let all its connections end now."""
        self._own_transport.kill()


class Rank(InMemory, LoopHost):
    """Process of a rank."""


class SteppingRank(InMemory, LocalStepsHost):
    """Process of a rank that makes local steps."""


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

    def __init__(self, serve, host):
        self.result = self.read_state = self.end = None
        self._host = host
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
        self._host.end_run(outcome, reason)

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
        settings: `accumulate`, `clip_norm`, `stop`, and the options of the run.
    """

    def __init__(self, count, make_parts, protocol, **settings):
        self._network = MemoryNetwork()
        self._count = count
        self._protocol = protocol
        self._settings = settings
        self.server = None
        self._make_parts = make_parts
        self._returns = settings.pop("returns", False)
        self._steps_here = parse_plan(protocol).local_steps is not None
        self.parts = [make_parts() for _ in range(count)]
        self._digests = [sample_digest(loader) for _, _, loader in self.parts]
        self.hosts = [None] * count
        self.answers = [None] * count

    def run(self, loop):
        """Call `loop(run, model, optimizer)` in the thread of each rank, and return what it returns or raises."""
        threads = [threading.Thread(target=self._loop, args=[loop, rank], daemon=True) for rank in range(self._count)]
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
        self.hosts[rank].kill()
        raise Killed(is_restarted)

    def _attach(self, rank):
        model, optimizer, loader = self.parts[rank]
        given = dict(self._settings)
        accumulate, clip_norm, stop = (given.pop(name, None) for name in ("accumulate", "clip_norm", "stop"))
        loop = UserLoop(
            model=model,
            optimizer=optimizer,
            loader=loader,
            accumulate=accumulate or 1,
            clip_norm=clip_norm,
            digest=self._digests[rank],
        )
        exchange, plan, options = Exchange(), parse_plan(self._protocol), RunOptions.of({"seed": 1, **given})

        def config_of(stop, number=rank + 1, process=None):
            job = make_job(describe(*loop, steps_here=self._steps_here), tensors_of(model))
            if process is None and self._steps_here:
                process = self.hosts[rank] = SteppingRank(self._network, exchange, loop)
            elif process is None:
                process = self.hosts[rank] = Rank(self._network, exchange)
            return options.config(job, plan, self._cluster(number), stop, process)

        def start_server(stop):
            if rank:
                return None
            first = {} if self._steps_here else named_state(optimizer, model)

            host = Server(self._network)

            def serve(server):
                session, folder, resumption, policy = options.open_session(config_of(stop, 0, host))
                load_named_state(session.server.optimizer, session.model, first)
                server.read_state = dict if self._steps_here else state_reader(session.server)
                return session, run_session(session, folder, resumption, [], policy)

            self.server = ServerThread(serve, host)
            return self.server

        kind = LocalStepsRun if self._steps_here else AttachedRun
        return kind(
            loop,
            Stop.parse(stop) if stop else None,
            exchange,
            config_of,
            start_server,
            self._count,
            returns=self._returns,
        )

    def _cluster(self, rank):
        ranks = LaunchEnv.from_environment(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._count + 1),
                "LOCAL_WORLD_SIZE": str(self._count + 1),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "PACELINE_TOKEN": TOKEN,
            }
        )
        cluster = Torchrun(ranks=replace(ranks, ranks_before=1), start_timeout_s=START_TIMEOUT_S)
        return replace(cluster, worker_at_server=False)
