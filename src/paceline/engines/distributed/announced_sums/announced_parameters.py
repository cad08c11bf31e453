"""Parameters of a run without a server, at its coordinator: it announces each sum, and has the parameters on demand."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, Interrupt, Step
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.announced_sums.summing_ranks import SummingRanks
from paceline.engines.distributed.parameter_server.loop_options import LoopOptions
from paceline.engines.task_board import ProcessParameters
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.version_store import VersionStore
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class AnnouncedParameters(ProcessParameters):
    """Parameters that every rank has, with the gradients that its worker has computed.

    The coordinator says which gradients count; the ranks sum these, and each steps its own optimizer. The server of
    this process has the parameters of a version only after `gather`.

    Args:
        server: parameters with which the run begins, and with which it ends.
        versions: storage of the versions that are evaluated.
        ranks: ranks that sum.
        options: options of steps that the loops of workers set.
        are_sharded: whether each rank has a shard of every version, so that no process has a whole one.
        saves_shards: whether the ranks save them where others save what this process has.

    Attributes:
        are_here: whether the server of this process has the newest version, and all that was accepted.
        is_resumed: whether the run begins with a saved version.
        on_update: callback with each update before the ranks make it, and the newest version that all of them have.
    """

    not_finite = ""  # the ranks tell it by a message

    def __init__(
        self,
        server: ParameterServer,
        versions: VersionStore,
        ranks: SummingRanks,
        options: LoopOptions,
        *,
        are_sharded: bool = False,
        saves_shards: bool = False,
    ) -> None:
        self._server = server
        self._versions = versions
        self._ranks = ranks
        self._options = options
        self._are_sharded = are_sharded
        self._saves_shards = saves_shards
        self.is_resumed = False
        self._ledger = ranks.ledger
        self._missing: dict[int, bytes] = {}  # parameters without a gradient in the newest gradient of each worker
        self.are_here = True
        self.on_update: Callable[[Apply, int], None] | None = None

    def resume_at(self, version: int) -> None:
        """Begin with what the server holds as this version, or with the shards that the ranks have saved of it."""
        self.is_resumed = version > 0
        self._ledger.resume_at(version)

    def begin(self) -> None:
        """Publish the first version, with which all ranks begin."""
        self._server.publish(self._versions.publish(self._ledger.version))

    def acquire(self, version: int) -> None:
        """Do nothing: each rank keeps the version that its worker reads."""

    def release(self, version: int) -> None:
        """Do nothing, as `acquire`."""

    def received(self, worker: int, draw: int, missing: Container[int], version: int | None) -> None:
        """Note which parameters have no gradient in the newest one of a worker."""
        assert isinstance(missing, IndexBits)
        self._missing[worker] = missing.content

    def assigned(self, command: Compute) -> None:
        """Note a task: if its worker is lost after its gradient was accepted, another one computes it again."""
        self._ledger.assign(command)

    def cancelled(self, command: Interrupt) -> None:
        """Do nothing: a gradient that does not count stays where it is."""

    def lost(self, worker: int) -> None:
        """Do nothing: what the worker had is noted when its process ends."""

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return the arrival."""
        return arrival

    def accept(self, command: Accept) -> None:
        """Note a gradient that counts."""
        self.are_here = False
        self._ledger.accept(command, self._missing[command.worker])

    def apply(self, command: Apply) -> Step | None:
        """Let the ranks make an update; return its step if it is measured."""
        self.are_here = False
        if command.is_skipped:
            self._ledger.drop()
        if self.on_update is not None:
            self.on_update(command, self._ledger.made)
        self._ranks.announce(command, self._options.newest)
        self._server.advance_schedule(command.workload)  # its rate is recorded
        return self._ranks.await_step(command.version) if command.measure else None

    def gather(self) -> None:
        """Bring the newest version, its optimizer and what was accepted since to the server of this process.

        Shards stay at the ranks, which save them.

        Raises:
            RunError: all ranks are gone.
        """
        if self.are_here:
            return
        if self._ledger.has_next:
            self._ranks.announce(None)
        if not self._are_sharded:
            self._fetch()
        elif self._saves_shards:
            self._ranks.save_shards()
        self.are_here = True

    def newest_state(self) -> dict[str, Any]:
        """Return the newest version and its optimizer, without what was accepted since, which stays at the ranks.

        Raises:
            RunError: all ranks are gone.
        """
        if not self.are_here:
            self._fetch()
        return self._server.state_dict()

    def take(self, state: Mapping[str, Any] | None) -> bool:
        """Begin with the state of a rank; return False if there is none."""
        if state is not None:
            self._load(state)
        return state is not None

    def _fetch(self) -> None:
        self._load(self._ranks.state())

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._versions.newest != self._ledger.version:
            self._server.publish(self._versions.publish(self._ledger.version))
        self._server.load_state_dict(state)

    def accumulate(self) -> None:
        """Do nothing: the ranks sum at once."""

    def check(self, now: float) -> None:
        """Do nothing: each rank checks its own parameters."""

    def close(self) -> None:
        """Bring the newest version here after a failure, if the ranks still have it; the failure itself is raised."""
        try:
            self.gather()
        except Exception as error:
            LOG.warning("the parameters of this process are those of version %d: %s", self._versions.newest, error)
