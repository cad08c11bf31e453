"""Installation of the balancer in a rank: after torch has been imported, before the script trains."""

from __future__ import annotations

import os
import sys

from paceline.shares.settings import BalanceSettings
from paceline.utils.after_import import call_after_import

ATTACH = "paceline.user_loop.attach"


def install() -> None:
    """Arrange that models of several ranks are taken over, if the launcher has asked for it."""
    settings = BalanceSettings.from_environment(os.environ)
    if settings is not None:
        call_after_import("torch", lambda: _patch(settings))


def _patch(settings: BalanceSettings) -> None:
    import torch.distributed as dist

    if dist.is_available():
        from paceline.shares.refusals import refuse_others
        from paceline.shares.script import end_balancing, install_patches
        from paceline.shares.survival.install import survival_of_rank, tell_launcher_of_groups

        survival = survival_of_rank(os.environ, settings.launch) if settings.on_death == "survive" else None
        install_patches(settings, survival)
        refuse_others()
        call_after_import(ATTACH, lambda: sys.modules[ATTACH].on_shards.append(end_balancing))
        tell_launcher_of_groups(survival)
