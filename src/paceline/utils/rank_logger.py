"""Loggers whose records name the rank of the process."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

LABELLED = "PACELINE_LABELLED"  # "1" where `paceline run` writes the rank before each line, or each rank has a file


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger adapter that adds the rank: as attribute ``rank`` of each record and as ``[rank 1]`` before the message.

    The rank is torchrun's ``RANK``; without it the attribute is None and the message has no prefix. The prefix is part
    of the message because Python shows only the message where a script configures no logging. Under `paceline run` it
    is not, because each line there has one.

    Args:
        name: name of the module that logs, within ``paceline``.

    >>> RankLogger("paceline.run").process("the run ended", {})
    ('the run ended', {'extra': {'rank': None}})
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its prefix, and the keyword arguments with the rank."""
        given = os.environ.get("RANK", "")
        rank = int(given) if given.isdecimal() else None
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "rank": rank}
        return msg if rank is None else f"{rank_label(rank)}{msg}", kwargs


def rank_label(rank: int) -> str:
    """Return what a line of a rank begins with: its number, unless the launcher writes it."""
    return "" if os.environ.get(LABELLED) == "1" else f"[rank {rank}] "
