"""Collectives of a script without DDP, from torch's flight recorder: when a rank began each, and in which step."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable
from time import monotonic, time_ns
from typing import Any

import torch.distributed as dist

from paceline.ddp_recording.layout import FLUSH_S

BUFFER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
BUFFER_ENTRIES = 5000  # which the collectives of five seconds should not exceed
DEFAULT_GROUP = "default_pg"  # of gloo the flight recorder has no configuration
Row = tuple[int, int, int, int]  # as layout.COLLECTIVE_COLUMNS


class CollectiveLog:
    """Reader of the flight recorder; a step ends with the step of an optimizer.

    Args:
        emit: function that takes the rows.
    """

    def __init__(self, emit: Callable[[Iterable[Row]], object]) -> None:
        self._emit = emit
        self._ends_ns: list[int] = []
        self._newest: dict[int, int] = {}  # sequence number of the last collective by group
        self._read_s = monotonic()

    @staticmethod
    def enable() -> None:
        """Switch the flight recorder on, which reads this variable at the first collective."""
        os.environ.setdefault(BUFFER_VARIABLE, str(BUFFER_ENTRIES))

    def step_ended(self) -> None:
        """Note the end of a step, and read the collectives if it is time."""
        self._ends_ns.append(time_ns())
        if monotonic() - self._read_s >= FLUSH_S:
            self.read()

    def read(self) -> None:
        """Emit the collectives of groups of all ranks that began since the last call."""
        self._read_s = monotonic()
        if self._ends_ns and dist.is_initialized():
            dump = json.loads(torch_dump())
            rows = list(rows_of(dump, dist.get_world_size(), self._ends_ns))
            new = [row for row in rows if row[2] > self._newest.get(row[1], 0)]
            self._newest.update({row[1]: row[2] for row in new})
            self._emit(new)


def torch_dump() -> bytes:
    """Return the content of the flight recorder as JSON."""
    from torch._C import _distributed_c10d

    dump: bytes = _distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return dump


def rows_of(dump: dict[str, Any], world_size: int, ends_ns: list[int]) -> Iterable[Row]:
    """Yield the rows of a dump of the flight recorder.

    Args:
        dump: content of the flight recorder.
        world_size: number of ranks; collectives of smaller groups are left out.
        ends_ns: ends of the steps, in order.
    """
    whole = {name for name, group in dump["pg_config"].items() if len(json.loads(group["ranks"])) == world_size}
    for entry in dump["entries"]:
        name, description = entry["process_group"]
        if (name in whole or description == DEFAULT_GROUP) and name.isdecimal() and not entry["is_p2p"]:
            created_ns = entry["time_created_ns"]
            yield bisect_left(ends_ns, created_ns), int(name), entry["collective_seq_id"], created_ns
