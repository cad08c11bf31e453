"""Installation of the balancer in a rank: after torch has been imported, before the script trains."""

from __future__ import annotations

import atexit
import os
import sys

from paceline.balance.settings import BalanceSettings
from paceline.utils.after_import import call_after_import


def install() -> None:
    """Arrange that models of several ranks are taken over, if the launcher has asked for it."""
    settings = BalanceSettings.from_environment(os.environ)
    if settings is not None:
        call_after_import("torch", lambda: _patch(settings))


def _patch(settings: BalanceSettings) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from paceline.balance.patches import Patches

    patches = Patches(settings)
    patches.install()

    def say_gain() -> None:
        balancer = patches.balancer
        if balancer is not None and balancer.rank == 0 and (line := balancer.gain.line()):
            print(line, file=sys.stderr)

    atexit.register(say_gain)
