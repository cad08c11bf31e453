"""Tensors of a run without a server at its coordinator: it has none of the workers' gradients and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.engines.distributed.announced_sums.announced_parameters import AnnouncedParameters
from paceline.engines.distributed.announced_sums.grouped_peers import GroupedPeers
from paceline.engines.distributed.announced_sums.sum_groups import SumGroups
from paceline.engines.distributed.announced_sums.summing_ranks import ALL_GONE, SummingRanks
from paceline.engines.distributed.coordinator_tensors import CoordinatorTensors, SentVersion, Taken
from paceline.engines.distributed.parameter_server.loop_options import LoopOptions
from paceline.engines.distributed.parameter_server.remote_worker import ArrivingGradient, RemoteWorker
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.real_clock import RealClock
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.version_store import VersionStore

LACKS_SUMS = -1  # in place of the number of the newest sum


class AnnouncedTensors(CoordinatorTensors):
    """Versions that each rank makes itself, of gradients that the ranks sum.

    Args:
        server: parameters with which the run begins, and with which it ends.
        versions: storage of the versions that are evaluated.
        groups: groups of the ranks, which receive all messages first.
        clock: clock of the run.
        read: reads messages for a moment.
        timeout_s: returns the seconds after which a worker that computes counts as lost.
        options: options of steps that the loops of workers set.
        saves_shards: whether ranks with shards save them, in the folder of the run.
    """

    parameters: AnnouncedParameters

    def __init__(
        self,
        server: ParameterServer,
        versions: VersionStore,
        *,
        groups: SumGroups,
        clock: RealClock,
        read: Callable[[], None],
        timeout_s: Callable[[], float],
        options: LoopOptions,
        saves_shards: bool = False,
    ) -> None:
        self._server = server
        self._groups = groups
        self._are_sharded = groups.are_sharded
        self.receiver = GroupedPeers(groups, groups.group_size) if self._are_sharded else groups
        self._ranks = SummingRanks(groups, clock, read, timeout_s)
        self.parameters = AnnouncedParameters(
            server, versions, self._ranks, options, are_sharded=self._are_sharded, saves_shards=saves_shards
        )

    @property
    def is_busy(self) -> bool:
        """Whether the coordinator waits for the ranks."""
        return self._ranks.is_busy

    def begin(self, workers: Iterable[RemoteWorker]) -> None:
        """Give all ranks the first version, and let them form a group.

        Shards of it come from the first worker.
        """
        state = None if self._are_sharded else self._server.state_dict()
        for number, worker in enumerate(sorted(workers, key=lambda each: each.worker)):
            self._add(worker, state, lacks_sums=number > 0)
        self._groups.form()

    def follow(self, stream: StandbyStream) -> None:
        """Tell a standby the events of each update before the ranks make it."""
        self.parameters.on_update = stream.add_update

    def take_over(self, workers: Iterable[RemoteWorker], newest: int) -> Taken:
        """Bring the newest version that a rank has here, give it to all, and let them form a group.

        Raises:
            RunError: no rank is left.
        """
        came = sorted(workers, key=lambda each: (-each.version, each.worker))
        for source in [each for each in came if 0 <= each.version <= newest]:
            self.parameters.resume_at(source.version)
            if self._add(source, None) and self.parameters.take(self._ranks.state_of(source)):
                break
        else:
            if not came or came[0].version >= 0:
                raise RunError(ALL_GONE)
            source = None  # the run has not begun
        for worker in came:
            if worker is not source:
                self._add(worker, self._server.state_dict())
        self._groups.form()
        return Taken(self._ranks.ledger.version, self._ranks.newest_step)

    def admit(self, worker: RemoteWorker) -> None:
        """Give a rank the newest version, and let all form a new group."""
        has_members = bool(self._groups.members)  # else the parameters are here
        state = None
        if not self._are_sharded:
            state = self.parameters.newest_state() if has_members else self._server.state_dict()
        if self._add(worker, state, lacks_sums=True):
            self._groups.form()

    def _add(self, worker: RemoteWorker, state: Mapping[str, Any] | None, *, lacks_sums: bool = False) -> bool:
        """Give a rank the state of its server, None if it has that; return False if it is gone.

        Args:
            worker: worker of the rank.
            state: state of the server.
            lacks_sums: whether the ranks of a worker with shards take the state from another one.
        """
        ledger = self._ranks.ledger
        if not self._are_sharded:
            return self._groups.add(worker, {"server": state, "made": ledger.number, "version": ledger.version})
        made = LACKS_SUMS if lacks_sums else ledger.number
        loads = self.parameters.is_resumed and not lacks_sums
        return self._groups.add(worker, {"made": made, "version": ledger.version, "loads": loads})

    def version_for(self, worker: RemoteWorker, version: int) -> SentVersion:
        """Return whether the gradient is summed early; the rank has made the version."""
        return SentVersion(early=self._groups.rounds.give(worker.worker, version))

    def on_message(self, worker: RemoteWorker, message: Message, now_s: float) -> None:
        """Handle a message about sums."""
        self._ranks.on_message(worker, message)

    def on_gradient(self, worker: int, arriving: ArrivingGradient, seconds: float) -> None:
        """Note whether its sum has begun; the gradient stays where it is."""
        if arriving.done.is_summed:
            self._groups.rounds.begun(worker, arriving.done.draw)

    def settle(self) -> None:
        """Let the ranks go on after the loss of one."""
        self._ranks.settle()

    def leaving(self) -> None:
        """Let the ranks sum what counts, and bring the newest version here, before a rank takes its part with it."""
        self.parameters.gather()

    def lose(self, worker: RemoteWorker) -> None:
        """Note what a rank takes with it.

        Raises:
            RunError: it was the last one, and has the newest parameters.
        """
        self._ranks.lose(worker)
        if not self._groups.members and not self.parameters.are_here:
            raise RunError(ALL_GONE)

    def ended(self) -> None:
        """Bring the last version to this process."""
        self.parameters.gather()

    def close(self) -> None:
        """Destroy the groups."""
        self._groups.close()
