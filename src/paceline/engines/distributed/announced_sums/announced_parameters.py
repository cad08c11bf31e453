"""Parameters of a run without a server, at its coordinator: it announces each sum, and has the parameters on demand."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Accept, Apply, Arrival, Compute, Interrupt, Step
from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.transport.sum_messages import AnnounceSum, SummedGradient
from paceline.engines.ports import Parameters
from paceline.engines.task_board import TaskParameters
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer
from paceline.tensors.version_store import VersionStore
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class AnnouncedParameters(Parameters, TaskParameters):
    """Parameters that every rank has, with the gradients that its worker has computed.

    The coordinator says which gradients count; the ranks sum these, and each steps its own optimizer. The server of
    this process has the parameters of a version only after `gather`.

    Args:
        server: parameters with which the run begins, and with which it ends.
        versions: storage of the versions that are evaluated.
        announce: function that sends a message to all ranks.
        fetch: function that returns the state of the ranks' servers.
        await_step: function that waits for the step that has made a version, and returns it.
    """

    not_finite = ""  # the ranks tell it by a message

    def __init__(
        self,
        server: ParameterServer,
        versions: VersionStore,
        announce: Callable[[AnnounceSum], None],
        fetch: Callable[[], dict[str, Any]],
        await_step: Callable[[int], Step],
    ) -> None:
        self._server = server
        self._versions = versions
        self._announce = announce
        self._fetch = fetch
        self._await_step = await_step
        self._version = 0
        self._missing: dict[int, bytes] = {}  # parameters without a gradient in the newest gradient of each worker
        self._held: list[SummedGradient] = []  # accepted, and in no sum yet
        self._missing_in_held: list[bytes] = []
        self._is_here = True  # whether the server of this process has the newest version

    def resume_at(self, version: int) -> None:
        """Begin with what the server holds as this version."""
        self._version = version

    def begin(self) -> None:
        """Publish the first version, with which all ranks begin."""
        self._server.publish(self._versions.publish(self._version))

    def acquire(self, version: int) -> None:
        """Do nothing: each rank keeps the version that its worker reads."""

    def release(self, version: int) -> None:
        """Do nothing, as `acquire`."""

    def received(self, worker: int, draw: int, missing: Container[int], version: int | None) -> None:
        """Note which parameters have no gradient in the newest one of a worker."""
        assert isinstance(missing, IndexBits)
        self._missing[worker] = missing.content

    def assigned(self, command: Compute) -> None:
        """Do nothing: a rank keeps what was accepted."""

    def cancelled(self, command: Interrupt) -> None:
        """Do nothing, as `assigned`."""

    def lost(self, worker: int) -> None:
        """Do nothing: the run ends."""

    def arrived(self, arrival: Arrival, coordinator: Coordinator) -> Arrival:
        """Return the arrival."""
        return arrival

    def accept(self, command: Accept) -> None:
        """Note a gradient that counts."""
        self._is_here = False
        self._held.append(SummedGradient(command.worker, command.draw, command.samples))
        self._missing_in_held.append(self._missing[command.worker])

    def apply(self, command: Apply) -> Step | None:
        """Let the ranks make an update; return its step if it is measured."""
        self._sum(command)
        self._version = command.version
        self._is_here = False
        self._server.advance_schedule(command.workload)  # its rate is recorded
        return self._await_step(command.version) if command.measure else None

    def gather(self) -> None:
        """Bring the newest version, its optimizer and what was accepted since to the server of this process.

        Raises:
            RunError: a rank is gone.
        """
        if self._is_here:
            return
        if self._held:
            self._sum(None)
        state = self._fetch()
        if self._versions.newest != self._version:
            self._server.publish(self._versions.publish(self._version))
        self._server.load_state_dict(state)
        self._is_here = True

    def accumulate(self) -> None:
        """Do nothing: the ranks sum at once."""

    def check(self, now: float) -> None:
        """Do nothing: each rank checks its own parameters."""

    def close(self) -> None:
        """Bring the newest version here after a failure, if the ranks still have it."""
        try:
            self.gather()
        except RunError as error:
            LOG.warning("the parameters of this process are those of version %d: %s", self._versions.newest, error)

    def _sum(self, update: Apply | None) -> None:
        self._announce(AnnounceSum.of(self._held, IndexBits.in_all(self._missing_in_held), update))
        self._held = []
        self._missing_in_held = []
