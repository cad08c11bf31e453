"""Store of checkpoints: one folder each, written atomically and verified by checksums."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from psutil import virtual_memory
from safetensors import SafetensorError

from paceline.checkpoint.codec import Tensors, decode, encode
from paceline.errors import PacelineWarning, RunError, UsageError
from paceline.tensors import tensor_file
from paceline.utils.files import UNFINISHED, ContentError, parse_json, read_bytes, refuse_link, replace_file, writing

SCHEMA = 2
STATE = "state.json"
TENSORS = "tensors.safetensors"
SUMS = "SHA256SUMS"
LATEST = "latest"
MOST_SUMS_BYTES = 1 << 12
MOST_NAME_BYTES = 1 << 12
DEEPEST = 200  # levels of nested state
KEPT = "; the run stopped, and the checkpoints before it are kept"


class Checkpoints:
    """Latest checkpoints of one run.

    Each checkpoint is a folder with `state.json`, `tensors.safetensors` and `SHA256SUMS` (in the format of
    `sha256sum --check`). It is written beside its place, synchronized to the disk and then renamed. The file `latest`
    names the newest, and may be changed by hand to name an older one.

    Args:
        path: folder of the checkpoints, which need not exist.
        keep: number of checkpoints to keep, >= 1.
        counted: what the version of a checkpoint counts, in the singular; part of its name.
    """

    def __init__(self, path: Path, keep: int = 1, counted: str = "update") -> None:
        if keep < 1:
            raise UsageError(f"keep {keep} checkpoints, expected at least 1")
        self._path = path
        self._keep = keep
        self._counted = counted

    def save(self, version: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint.

        Args:
            version: number of updates made, or of what else is counted; part of the name.
            state: plain data and tensors.

        Raises:
            RunError: the checkpoint cannot be written; earlier ones are unchanged.
        """
        tensors: Tensors = {}
        content = {"schema": SCHEMA, "state": encode(state, tensors)}
        number = max((_number(path) for path in self._all()), default=0) + 1
        path = self._path / f"{number:06d}-{self._counted}-{version}"
        with writing(f"the checkpoint {path}", KEPT, (OSError, SafetensorError)):
            unfinished = self._path / UNFINISHED
            refuse_link(self._path)
            _clear(unfinished)
            unfinished.mkdir(parents=True)
            files = {STATE: json.dumps(content, allow_nan=False).encode(), TENSORS: tensor_file.to_bytes(tensors)}
            for name, data in {**files, SUMS: _sums(files)}.items():
                replace_file(unfinished / name, data, to_disk=True)
            _to_disk(unfinished)
            unfinished.rename(path)
            replace_file(self._path / LATEST, path.name.encode(), to_disk=True)
            _to_disk(self._path)
            for old in self._all()[self._keep :]:
                _clear(old)
        return path

    @property
    def newest(self) -> Path | None:
        """Checkpoint from which a run would be resumed, if it is not damaged; None without any."""
        return next(iter(self._newest_first()), None)

    def whole(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the checkpoints that are not damaged, the newest first.

        Every damaged checkpoint is skipped with a warning.

        Raises:
            RunError: there are checkpoints, but all are damaged.
            UsageError: one of them has another schema.
        """
        candidates = self._newest_first()
        is_any_whole = False
        for path in candidates:
            try:
                state = _read(path)
            except _DamagedError as error:
                warnings.warn(
                    f"the checkpoint {path} is damaged ({error}): the one before it is used",
                    PacelineWarning,
                    stacklevel=2,
                )
                continue
            is_any_whole = True
            yield path, state
        if candidates and not is_any_whole:
            raise RunError(f"every checkpoint in {self._path} is damaged; start the run again from its beginning")

    def clear(self) -> None:
        """Remove all checkpoints.

        Raises:
            OSError: a file cannot be removed.
        """
        for path in self._all():
            _clear(path)

    def _all(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        return sorted(
            (path for path in self._path.glob(f"*-{self._counted}-*") if _number(path)), key=_number, reverse=True
        )

    def _newest_first(self) -> list[Path]:
        found = self._all()
        try:
            named = self._path / read_bytes(self._path / LATEST, MOST_NAME_BYTES).decode().strip()
        except (OSError, ValueError):
            return found  # the numbers give the same order
        return [named, *(path for path in found if path != named)] if named in found else found


# Errors of decoding, and of the parts of a run, for content that no run has written.
_WRONG_CONTENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, SafetensorError)


class _DamagedError(Exception):
    """The content of a checkpoint is not what was written."""


def _read(path: Path) -> dict[str, Any]:
    try:
        available_bytes = virtual_memory().available
        files = {name: read_bytes(path / name, available_bytes) for name in (STATE, TENSORS)}
        sums = read_bytes(path / SUMS, MOST_SUMS_BYTES)
    except OSError as error:
        raise _DamagedError(f"{error.filename}: {error.strerror}") from error
    except ContentError as error:
        raise _DamagedError(f"of a file in it, {error}") from error
    if sums != _sums(files):
        raise _DamagedError(f"its files do not have the sums in {SUMS}")
    try:
        return _decoded(path, files)
    except UsageError:
        raise
    except _WRONG_CONTENT as error:
        raise _DamagedError(f"its sums are right, its content is not: {type(error).__name__} {error}") from error


def _decoded(path: Path, files: Mapping[str, bytes]) -> dict[str, Any]:
    content = parse_json(files[STATE], DEEPEST)
    if content["schema"] != SCHEMA:
        raise UsageError(
            f"the checkpoint {path} has schema {content['schema']}, this version reads schema {SCHEMA}; resume the run "
            "with the paceline version in its run.json, or start a new run"
        )
    return {**decode(content["state"], tensor_file.from_bytes(files[TENSORS]))}


def _sums(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def _number(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def _clear(folder: Path) -> None:
    """Remove a folder that an unfinished save has left, or a link in its place."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
