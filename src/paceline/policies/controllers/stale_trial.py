"""Trial of stale gradients by `auto`: how stale they may be, and when the choice is taken back."""

from __future__ import annotations

from paceline.policies.estimators.noise.loss_rise import LossRise
from paceline.protocols.protocol import Protocol
from paceline.utils.state_dict import Stateful

DOUBLED_EVERY = 48  # accepted gradients of stale protocols after which their largest staleness is doubled
PAUSE = 800  # gradients without stale protocols after a rise of the loss
LARGEST_DOUBLINGS = 32


class StaleTrial(Stateful):
    """State of the trial of stale gradients.

    The first stale protocol may have a mean staleness of one version, and twice as much after every 48 of its gradients
    without a rise of the loss. At the first rise (`LossRise`) the protocol is the last fresh one again, and stale ones
    are left out for 800 gradients, for twice as many at each further rise.

    Attributes:
        before: fresh protocol in force before the stale ones; None for none, and under a fresh protocol.
        fresh_until: workload up to which stale protocols are left out, because the loss had risen.
    """

    _saved = ("before", "fresh_until", "_gradients", "_pause")
    _parts = ("_rise",)

    def __init__(self) -> None:
        self.before: Protocol | None = None
        self.fresh_until = 0
        self._gradients = 0  # of stale protocols, since the loss rose last
        self._pause = PAUSE
        self._rise = LossRise()

    @property
    def largest_staleness(self) -> float:
        """Mean staleness that a protocol may have now, in versions."""
        return 2.0 ** min(self._gradients // DOUBLED_EVERY, LARGEST_DOUBLINGS)

    def follow(self, now: Protocol, new: Protocol) -> None:
        """Follow a change of the protocol."""
        if new.max_staleness == 0:
            self.before = None
        elif now.max_staleness == 0:
            self.before = now
        self._rise.begin()

    def accept(self, loss: float, protocol: Protocol) -> bool:
        """Add the loss of a gradient of a protocol; return whether the protocol is to be taken back."""
        has_risen = self._rise.accept(loss)
        if protocol.max_staleness == 0:
            return False
        self._gradients += 1
        return has_risen and self.before is not None

    def take_back(self, workload: int) -> None:
        """Leave stale protocols out, for longer each time."""
        self.leave_out(workload, self._pause)
        self._pause *= 2

    def leave_out(self, workload: int, gradients: int = PAUSE) -> None:
        """Leave stale protocols out for so many gradients, because the loss has risen."""
        self.fresh_until = max(self.fresh_until, workload + gradients)
        self._gradients = 0
