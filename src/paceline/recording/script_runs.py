"""Runs of a script of the user, which has its own loop and its own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError

SCRIPT = "script"  # entry of `run.json`, which only these runs have
SHARES, LIMITS = "shares", "share limits"  # kinds of their decisions, with a number for each rank
REGROUPED = "ranks"  # kind of the decision that other ranks go on, with equal shares and without what was known
COMPILED = "is_compiled"  # number of limits: 1 where each rank may have a few sizes only


def refuse_to_resume(configuration: Mapping[str, Any], path: object) -> None:
    """Refuse to resume the run of a script.

    Raises:
        UsageError: it is one.
    """
    if SCRIPT in configuration:
        job = configuration.get("job", "the script")
        raise UsageError(
            f"{path} is the run of a script, which has its own checkpoints: start it again, as paceline run {job}"
        )
