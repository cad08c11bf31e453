"""Stream of rank 0 to its standby, as an observer of the loop."""

from __future__ import annotations

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import AbortRun, Event
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.ports import Follower
from paceline.engines.signals import Signals
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)


class HandedOver(SystemExit):
    """Exit of rank 0, which leaves the run to its standby."""


class StandbyFollower(Follower):
    """Observer of the loop of rank 0, which sends its events and the mean gradients of its updates to a standby.

    Args:
        stream: stream to the standby.
        signals: signals that this process gets. On a spot notice it closes all connections without a word, so that the
            standby goes on.
        cluster: launch settings of this process.

    Attributes:
        stream: as given.
        has_handed_over: whether the run is left to the standby.
    """

    def __init__(self, stream: StandbyStream, signals: Signals, cluster: Torchrun) -> None:
        self.stream = stream
        self.has_handed_over = False
        self._signals = signals
        self._cluster = cluster

    def on_event(self, event: Event) -> None:
        """Add an event; on a spot notice, leave the run to the standby.

        Raises:
            HandedOver: the standby has all updates, and goes on.
        """
        if isinstance(event, AbortRun) and self._signals.is_notice and self.stream.is_there:
            LOG.warning("%s: the standby goes on with the run", self._signals.caught)
            self.stream.flush()
            self.has_handed_over = True
            raise HandedOver(self._cluster.leaving_status)
        self.stream.add(event)

    def on_commands(self) -> None:
        """Wait, with `standby_sync`, until the standby has received what is recorded now."""
        if self._cluster.standby_sync:
            self.stream.flush()

    def before_wait(self) -> None:
        """Send the newest mean gradient."""
        self.stream.send()
