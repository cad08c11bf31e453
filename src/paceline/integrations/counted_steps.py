"""Check of protocols for frameworks that count each step of the optimizer as an update."""

from __future__ import annotations

from paceline.catalogue.parser import parse_plan
from paceline.errors import UsageError
from paceline.policies.controllers.auto import with_whole_minibatches
from paceline.policies.controllers.balance import balances_of


def check_counted_steps(protocol: str) -> None:
    """Check that each step of a framework's loop is an update of the run.

    Args:
        protocol: protocol as text.

    Raises:
        UsageError: several steps of a rank make one update.
    """
    plan = with_whole_minibatches(parse_plan(protocol))  # as `attach` takes it
    for balance in (each for each in balances_of(plan) if each.queue):
        raise UsageError(
            f"{plan} has several leases of a rank in an update, and the loop of this framework counts every step as an "
            f"update: type balanced(m={balance.pieces}, leases=1)"
        )
