"""Start of the ranks of one host: carries out what their supervisor decides, until the run ends."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar

from paceline.clusters.host_heartbeats import HEARTBEAT_S, SILENCE_S, HostHeartbeats
from paceline.clusters.launch_env import BEGUN_BEFORE, BOUND, ENDED, STANDBY, SURVIVES
from paceline.clusters.launch_settings import LaunchSettings
from paceline.clusters.launch_supervisor import OF_SCRIPTS, KillRank, LaunchAction, LaunchSupervisor, PassSignal
from paceline.clusters.rank_restarts import EndRank, MakeRank
from paceline.launcher.caught_signals import CaughtSignals
from paceline.launcher.launch_store import LaunchStore
from paceline.launcher.output import Pipe, RankOutput
from paceline.launcher.rank_process import Daemons, Ending, RankProcess, reaping_orphans
from paceline.launcher.run_facts import RunFacts
from paceline.launcher.store_client import StoreClient
from paceline.utils.rank_logger import LABELLED, RankLogger

LOG = RankLogger(__name__)
Answer = TypeVar("Answer")
CONNECT_TIMEOUT_S = 3.0
POLL_S = 0.05  # while what a rank has started is waited for
DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONUNBUFFERED": "1"}  # as under torchrun
DEFAULTS_OF_SEVERAL = {"OMP_NUM_THREADS": "1"}  # the same; else each rank would use all cores


def launch(
    settings: LaunchSettings, command: Sequence[str], log_dir: Path | None = None, first_pause_s: float = 1.0
) -> int:
    """Run a command as the ranks of this host, and return the exit status; no rank is left afterwards.

    Args:
        settings: ranks, and where they meet.
        command: command of every rank.
        log_dir: folder with a file for the output of each rank; None to show it on the terminal.
        first_pause_s: seconds before a rank is started again for the first time, >= 0.

    Raises:
        UsageError: the ranks cannot meet at the given address.
    """
    with ExitStack() as stack:
        stack.enter_context(reaping_orphans())
        signals = stack.enter_context(CaughtSignals())
        store: LaunchStore | StoreClient = LaunchStore(settings) if settings.node_rank == 0 else StoreClient(settings)
        stack.enter_context(store)
        output = RankOutput(settings, log_dir, partial(signals.add, signal.SIGHUP))
        stack.callback(output.close)
        supervisor = LaunchSupervisor(settings.ranks, settings.max_restarts, first_pause_s)
        launched = Launch(
            settings=settings, command=command, supervisor=supervisor, store=store, output=output, signals=signals
        )
        stack.callback(launched.close)
        return launched.run()


class Launch:
    """Ranks of one host, from their start to the end of the run.

    Args:
        settings: ranks, and where they meet.
        command: command of every rank.
        supervisor: supervisor of the ranks.
        store: store of the run, on the host of rank 0, or a client.
        output: output of the ranks.
        signals: signals to this process.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        command: Sequence[str],
        supervisor: LaunchSupervisor,
        store: LaunchStore | StoreClient,
        output: RankOutput,
        signals: CaughtSignals,
    ) -> None:
        self._settings = settings
        self._command = command
        self._supervisor = supervisor
        self._store = store if isinstance(store, LaunchStore) else None
        self._client = store.client
        self._heartbeats = HostHeartbeats()
        self._listened_s = 0.0
        self._output = output
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.waker, selectors.EVENT_READ)
        self._processes: dict[int, RankProcess] = {}  # the last one of each rank
        self._earlier: list[RankProcess] = []  # of which something is left
        self._starts: Counter[int] = Counter()
        self._daemons = Daemons()

    def run(self) -> int:
        """Run until the ranks have ended, and return the exit status."""
        self._listen()
        now = time.monotonic()
        self._carry_out(self._supervisor.begin(now), now)
        while (status := self._supervisor.status) is None:
            self._wait()
            self._handle(time.monotonic())
        self._end_what_is_left(time.monotonic())
        return status

    def close(self) -> None:
        """Kill the ranks that still run, and show what all have printed."""
        for process in self._processes.values():
            if process.status is None:
                process.kill()
                process.wait()
        self._daemons.kill()
        self._pass_on()
        for pipe in self._pipes():
            pipe.close()
        self._selector.close()

    def _listen(self) -> None:
        if self._store is not None:
            self._selector.register(self._store.listener, selectors.EVENT_READ)

    def _wait(self) -> None:
        """Wait for a signal, the end of a process, output, a client of the store, or something that is due."""
        is_polled = any(process.ending is Ending.ASKED for process in self._processes.values())
        timeout_s = POLL_S if is_polled else max(0.0, self._supervisor.wake_s - time.monotonic())
        if self._other_hosts:
            timeout_s = min(timeout_s, HEARTBEAT_S)
        for key, _ in self._selector.select(timeout_s if timeout_s < inf else None):
            if self._store is not None and key.fileobj is self._store.listener:
                self._selector.unregister(key.fileobj)
                self._store.begin()
            elif isinstance(key.data, Pipe):
                self._read(key.data)

    def _read(self, pipe: Pipe) -> None:
        if not pipe.pass_on():
            self._selector.unregister(pipe.stream)
            pipe.close()

    def _pipes(self) -> list[Pipe]:
        return [key.data for key in self._selector.get_map().values() if isinstance(key.data, Pipe)]

    def _pass_on(self) -> None:
        """Show what the ranks have printed so far, so that it comes before a message about their end."""
        for pipe in self._pipes():
            self._read(pipe)

    def _handle(self, now: float) -> None:
        """Tell the supervisor what has happened, and carry out what it decides."""
        for number in self._signals.take():
            self._carry_out(self._supervisor.on_signal(number, now), now)
        for rank, process in list(self._processes.items()):
            if process.ending is Ending.ASKED and process.has_ended(now):
                process.ending = Ending.OVER
                self._carry_out(self._supervisor.on_ended(rank, now), now)
            elif process.ending is Ending.NONE and (status := process.status) is not None:
                process.ending = Ending.OVER
                self._pass_on()
                self._carry_out(self._supervisor.on_exit(rank, status, now, self._told(rank)), now)
        stopped = [rank for rank, process in self._processes.items() if process.is_stopped]
        silence_s = self._asked(RunFacts.silence_s, inf) if stopped else inf
        self._carry_out(self._supervisor.on_stopped(stopped, now, silence_s), now)
        self._carry_out(self._supervisor.on_time(now), now)
        self._listen_to_hosts(now)

    @property
    def _other_hosts(self) -> range:
        """Hosts whose heartbeats this launcher listens to."""
        return range(1, self._settings.nnodes if self._store is not None else 1)

    def _listen_to_hosts(self, now: float) -> None:
        """Tell the loss of the ranks of hosts that are silent, if the others can go on without them."""
        is_due = bool(self._other_hosts) and now >= self._listened_s + HEARTBEAT_S
        if not is_due or self._store is None or not self._store.is_there:
            return
        self._listened_s = now
        facts = self._facts()
        ranks = facts.living
        living = [host for host in self._other_hosts if not ranks.isdisjoint(self._settings.ranks_of(host))]
        for host in self._heartbeats.silent(facts.heartbeats(self._other_hosts), living, now):
            if facts.survivors() and [rank for rank in self._settings.ranks_of(host) if facts.tell_loss(rank)]:
                LOG.warning("host %d was silent for %g s: its ranks count as lost", host, SILENCE_S)

    def _facts(self) -> RunFacts:
        return RunFacts(self._client(), self._settings.world_size)

    def _asked(self, question: Callable[[RunFacts], Answer], unknown: Answer) -> Answer:
        """Return what the store answers, or that nothing is known, if the connection to it is lost."""
        try:
            return question(self._facts())
        except RuntimeError:
            return unknown

    def _told(self, lost: int) -> list[str]:
        """Tell the ranks of a loss, and return what they have told about the run."""

        def tell(facts: RunFacts) -> list[str]:
            facts.tell_loss(lost)
            told = [fact for fact in (STANDBY, ENDED, BOUND) if facts.holds(fact)]
            return [*told, SURVIVES] if facts.survivors() else told

        return self._asked(tell, [])

    def _carry_out(self, actions: Iterable[LaunchAction], now: float) -> None:
        for action in actions:
            match action:
                case MakeRank(rank) if self._starts[rank] and not self._finds_store():
                    self._carry_out(self._supervisor.on_unreachable(rank, now), now)
                case MakeRank(rank):
                    self._make(rank)
                case EndRank(rank):
                    self._processes[rank].end(now)
                case KillRank(rank):
                    self._processes[rank].kill()
                case PassSignal(rank, number):
                    self._processes[rank].send(number)

    def _make(self, rank: int) -> None:
        """Start the process of a rank; with rank 0 all are started again, and meet in an empty store."""
        before = [*self._earlier, *([self._processes[rank]] if self._starts[rank] else [])]
        self._earlier = [process for process in before if process.is_left]
        if rank == 0 and self._starts[rank] and self._store is not None and not self._facts().survivors():
            self._renew(self._store)
        port = self._settings.port if self._store is None else self._store.port
        defaults = DEFAULTS if len(self._settings.ranks) == 1 else {**DEFAULTS, **DEFAULTS_OF_SEVERAL}
        labelled = {LABELLED: "1"} if self._output.is_piped else {}
        variables = self._settings.environment(rank, port, self._starts[rank])
        variables |= {BEGUN_BEFORE: self._store.begun if self._store is not None else ""}
        process = RankProcess(
            self._command, {**defaults, **os.environ, **variables, **labelled}, is_piped=self._output.is_piped
        )
        self._processes[rank] = process
        self._daemons.ranks.add(process.pid)
        self._starts[rank] += 1
        for pipe in self._output.pipes(rank, process.pipes):
            self._selector.register(pipe.stream, selectors.EVENT_READ, pipe)

    def _finds_store(self) -> bool:
        """Return whether the launcher on the host of rank 0 is there: else there is no run to return to."""
        if self._store is not None:
            return True
        try:
            socket.create_connection((self._settings.master, self._settings.port), CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def _renew(self, store: LaunchStore) -> None:
        if store.listener in self._selector.get_map():
            self._selector.unregister(store.listener)
        store.renew()
        self._listen()

    def _end_what_is_left(self, now: float) -> None:
        """Wait for what lost ranks have started, such as a server that saves the run, and for daemons of all ranks.

        A signal that ends a run kills it.
        """
        left = [process for process in [*self._earlier, *self._processes.values()] if process.status]
        for process in left:
            process.end(now)
        self._daemons.end(now)
        while not (
            self._daemons.have_ended(time.monotonic()) and all(each.has_ended(time.monotonic()) for each in left)
        ):
            self._selector.select(POLL_S)
            self._pass_on()
            if not set(self._signals.take()).issubset(OF_SCRIPTS):
                for process in left:
                    process.kill()
                self._daemons.kill()
