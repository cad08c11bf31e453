"""Settings of the shares from the text of a protocol."""

from __future__ import annotations

from typing import Any

from paceline.catalogue.parser import parse_plan
from paceline.catalogue.protocols import bsp
from paceline.errors import UsageError
from paceline.policies.controllers.balance import Balance
from paceline.protocols.protocol import as_plan
from paceline.shares.settings import BalanceSettings


def settings_of(protocol: str, **others: Any) -> BalanceSettings | None:
    """Return the settings of a protocol; None for bsp, under which the ranks are as under torchrun.

    Args:
        protocol: text of the protocol.
        others: other settings; None for those of the protocol.

    Raises:
        UsageError: ranks of DDP and FSDP2 do not run this protocol.

    Example:
        >>> settings_of("balanced(m=16, leases=1)").pieces
        16
    """
    plan = parse_plan(protocol)
    phase = plan.phases[0]
    if plan == as_plan(bsp()):
        return None
    balance = phase.controllers[0] if len(phase.controllers) == 1 else None
    if len(plan.phases) > 1 or not isinstance(balance, Balance) or balance.queue:
        raise UsageError(
            f"--protocol {protocol}: ranks of DDP and FSDP2 run balanced(m=8, leases=1), or bsp to be as under "
            "torchrun; for other protocols attach the loop (paceline.attach)"
        )
    given = {name: value for name, value in others.items() if value is not None}
    return BalanceSettings(**{"pieces": balance.pieces, "max_share": balance.max_share, **given})
