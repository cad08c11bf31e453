"""Checkpoints of the shards of a model, of which each rank saves its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.codec import Tensors, decode, encode
from paceline.checkpoint.store import Checkpoints
from paceline.errors import RunError
from paceline.recording.run_folder import SHARDS
from paceline.recording.validation import believed
from paceline.utils.files import refuse_link

KEEP = 3


class ShardStates:
    """Checkpoints of the state of one rank, in the folder of the run as its process sees it.

    The ranks of one worker save theirs, each beside its own process, so that no process needs memory for the whole
    model. A checkpoint of the coordinator names the version.

    Args:
        folder: folder of the run.
        shard: number of the shard, >= 0.
        count: number of shards, >= 1.
    """

    def __init__(self, folder: str | Path, shard: int, count: int) -> None:
        self._folder = Path(folder) / SHARDS
        self._shard = shard
        self._count = count

    def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Save the state of a version.

        Raises:
            OSError: it cannot be written.
            RunError: the same.
        """
        path = self._path(self._shard, self._count)
        for folder in (self._folder, path):
            refuse_link(folder)
        Checkpoints(path, KEEP).save(version, {"version": version, "server": dict(state)})

    def read(self, version: int, parameters: Collection[str]) -> dict[str, Any]:
        """Return the state of a version, from as many shards as there were when it was saved.

        Args:
            version: number of the version.
            parameters: names of the parameters in the state, whose rows are divided among the shards.

        Raises:
            RunError: there is none, or it is damaged.
        """
        with believed(self._folder, RunError):
            own = self._find(self._shard, self._count, version)
            if own is not None:
                return own
            counts = {int(each.name.partition("-of-")[2]) for each in self._folder.glob("0-of-*")} - {self._count}
            for count in sorted(counts):
                if self._find(0, count, version) is not None:
                    return self._joined(version, count, parameters)
        raise RunError(
            f"{self._path(self._shard, self._count)} has no shard of update {version}: resume the run with the folder "
            "that all ranks see"
        )

    def _path(self, shard: int, count: int) -> Path:
        return self._folder / f"{shard}-of-{count}"

    def _find(self, shard: int, count: int, version: int) -> dict[str, Any] | None:
        for _, state in Checkpoints(self._path(shard, count), KEEP).whole():
            if state["version"] == version:
                server: dict[str, Any] = state["server"]
                return server
        return None

    def _joined(self, version: int, count: int, parameters: Collection[str]) -> dict[str, Any]:
        """Return the state of this shard from shards of another number, of which one at a time is in memory."""
        rows = [self._rows(shard, count, version, parameters) for shard in range(count)]
        whole = {path: sum(each[path] for each in rows) for path in rows[0]}
        starts = dict.fromkeys(whole, 0)
        pieces: dict[str, list[Tensor]] = {path: [] for path in whole}
        content: Any = None
        others: Tensors = {}
        for shard in range(count):
            tensors: Tensors = {}
            encoded = encode(self._of(shard, count, version), tensors)
            if content is None:
                content, others = encoded, {path: each for path, each in tensors.items() if path not in whole}
            for path in whole:
                begin, end = own_rows(whole[path], self._shard, self._count)
                start, stop = starts[path], starts[path] + len(tensors[path])
                pieces[path].append(tensors[path][max(begin, start) - start : max(min(end, stop) - start, 0)].clone())
                starts[path] = stop
        decoded: dict[str, Any] = decode(content, others | {path: torch.cat(each) for path, each in pieces.items()})
        return decoded

    def _rows(self, shard: int, count: int, version: int, parameters: Collection[str]) -> dict[str, int]:
        """Return the rows of each tensor of a shard whose rows are divided, by its path."""
        tensors: Tensors = {}
        encode(self._of(shard, count, version), tensors)
        return {path: len(each) for path, each in tensors.items() if _is_divided(path, each, parameters)}

    def _of(self, shard: int, count: int, version: int) -> dict[str, Any]:
        found = self._find(shard, count, version)
        if found is None:
            raise RunError(f"{self._path(shard, count)} has no shard of update {version}, unlike those beside it")
        return found


def own_rows(rows: int, shard: int, count: int) -> tuple[int, int]:
    """Return the first row of a shard and the one after its last, as `fully_shard` divides a tensor.

    >>> [own_rows(5, shard, count=4) for shard in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-rows // count)
    return min(rows, shard * each), min(rows, (shard + 1) * each)


def _is_divided(path: str, tensor: Tensor, parameters: Collection[str]) -> bool:
    """Return whether the rows of a tensor are divided among the shards: of a parameter, its gradient or its state."""
    if path.startswith("state.model."):
        return path.removeprefix("state.model.") in parameters
    return path.startswith("state.mean.parameters.") or (path.startswith("state.optimizer.state.") and tensor.ndim > 0)
