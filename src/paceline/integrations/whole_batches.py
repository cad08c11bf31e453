"""Check of protocols for frameworks that count each step of the optimizer as an update."""

from __future__ import annotations

from paceline.catalogue.parser import parse_plan
from paceline.errors import UsageError


def check_whole_batches(protocol: str) -> None:
    """Check that each step of a framework's loop is one of a whole batch.

    Args:
        protocol: protocol as text.

    Raises:
        UsageError: the protocol cuts batches, so that several steps make one update.
    """
    plan = parse_plan(protocol)
    if plan.sets_shares:
        raise UsageError(
            f"{plan} cuts the batches of the ranks, and the loop of this framework counts every step as an update: "
            "type bsp, or leave DistributedDataParallel in the script and start it with paceline run, which balances it"
        )
