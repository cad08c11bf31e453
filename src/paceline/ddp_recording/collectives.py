"""Steps of a script without DDP, from the times at which its ranks began the collectives.

All ranks leave a collective together, so a rank waits from its own beginning until the last rank begins. This is
coarser than the marks of DDP: a collective that overlaps computing counts as waiting, the parts of a step are unknown,
and the clocks of hosts must be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.ddp_recording.layout import PARTS, STEP_COLUMNS

SHORTEST = 0.1  # share of the intervals between collectives that clocks are compared by
MOST_COLLECTIVES = 1 << 40  # of one group


def steps_of(ranks: Sequence[NDArray[np.float64]], hosts: Sequence[str]) -> list[Mapping[str, NDArray[Any]]]:
    """Return the rows of each rank, with the columns of ``layout.STEP_COLUMNS``, in seconds.

    Args:
        ranks: columns of ``layout.COLLECTIVE_COLUMNS`` of each rank.
        hosts: host of each rank.
    """
    keys = [rank[1].astype(np.int64) * MOST_COLLECTIVES + rank[2].astype(np.int64) for rank in ranks]
    common = keys[0]
    for each in keys[1:]:
        common = np.intersect1d(common, each)
    rows = [_rows_at(key, common) for key in keys]
    began_s = np.stack(
        [(rank[3][row] - ranks[0][3].min(initial=np.inf)) / 1e9 for rank, row in zip(ranks, rows, strict=True)]
    )
    order = np.argsort(began_s[0], kind="stable")
    began_s, steps = began_s[:, order], ranks[0][0][rows[0]][order].astype(np.int64)
    began_s = began_s - _clock_offsets_s(began_s, hosts)[:, None]
    return _rows(began_s, steps)


def _rows_at(key: NDArray[np.int64], common: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(key)
    found: NDArray[np.int64] = order[np.searchsorted(key[order], common)]
    return found


def _clock_offsets_s(began_s: NDArray[np.float64], hosts: Sequence[str]) -> NDArray[np.float64]:
    """Return the offset of each rank's clock from that of rank 0; 0 on the same host.

    Ranks that compute nothing between two collectives begin the second one together. Of these, the shortest intervals
    of both ranks are taken.
    """
    offsets = np.zeros(len(began_s))
    for rank, host in enumerate(hosts):
        if host != hosts[0] and began_s.shape[1] > 1:
            longest = np.maximum(*np.diff(began_s[[0, rank]], axis=1))
            short = longest <= np.quantile(longest, SHORTEST)
            offsets[rank] = np.median((began_s[rank] - began_s[0])[1:][short])
    return offsets


def _rows(began_s: NDArray[np.float64], steps: NDArray[np.int64]) -> list[Mapping[str, NDArray[Any]]]:
    waits_s = began_s.max(axis=0) - began_s
    numbers, first = np.unique(steps, return_index=True)
    ends_s = began_s.max(axis=0)[np.append(first[1:], len(steps)) - 1] if len(steps) else np.zeros(0)
    lengths_s = np.diff(ends_s, prepend=ends_s[:1])
    rows: list[Mapping[str, NDArray[Any]]] = []
    for own_s in waits_s:
        waited_s = np.minimum(np.add.reduceat(own_s, first), lengths_s) if len(steps) else np.zeros(0)
        parts = {f"{part}_ns": np.zeros_like(waited_s) for part in PARTS}
        parts[f"{PARTS[0]}_ns"] = lengths_s - waited_s
        rest = {"begin_ns": ends_s - lengths_s, "collectives_ns": np.zeros_like(waited_s), "sync_ns": waited_s}
        columns = {"step": numbers, **parts, **rest}
        rows.append({name: columns[name] for name in STEP_COLUMNS})
    return rows
