"""What was typed to begin a run, kept beside it, so that resuming it needs nothing but its folder."""

from __future__ import annotations

import json
import os
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from paceline.cli.trust import check_folder, code_of_job, is_trusted
from paceline.clusters.launch_env import started_by_torchrun
from paceline.core.records import Record
from paceline.errors import UsageError
from paceline.recording.callback import Callback
from paceline.recording.run_folder import RUN, FolderGoneError, SavedRun
from paceline.utils.files import ContentError, read_json, replace_file

COMMAND = "command.json"
CODE = "code"
NEEDED = ("job", "protocol", "cluster", "stop")
TEXTS = (*NEEDED, "evaluate_every", "checkpoint_every", "censored")
DEFAULTS = {"seed": 0, "checkpoint_every": "seconds=60", "keep_checkpoints": 3}


class SavedOptions(UserDict[str, Any]):
    """Options as they were typed; None for what was left out."""

    _code: Mapping[str, str] = {}  # digests of the job's own files by module, before anything is imported

    def completed(self, resumed: Path | None, *, trust: bool = False) -> Self:
        """Return these options, with those of the run that is resumed and the defaults where they were left out.

        A rank that does not see its folder, which rank 0 alone needs, goes by what was typed for it; that the others
        were asked for the same is seen when they meet. A job that was typed now is taken as typed.

        Args:
            resumed: folder of the run; None for a new run.
            trust: whether a job that only the folder names is imported without a check of the folder and its code.

        Raises:
            UsageError: something that is needed is still missing, or the folder is not to be trusted.
        """
        before = _read(resumed) if resumed is not None and not _is_elsewhere(resumed) else {}
        given = {name: value for name, value in self.items() if value is not None}
        recorded = before.pop(CODE, None)
        if resumed is not None and "job" in before and "job" not in given:
            check_folder(resumed, resumed / COMMAND, before["job"], recorded, trusted=is_trusted(trust))
        here = {"cluster": "torchrun"} if started_by_torchrun(os.environ) else {}
        whole = type(self)({**dict.fromkeys(self), **DEFAULTS, **here, **before, **given})
        missing = [name for name in NEEDED if whole[name] is None]
        if missing:
            raise UsageError(_missing(missing, resumed))
        whole._code = code_of_job(whole["job"])
        return whole

    def kept_in(self, folder: Path) -> Callback:
        """Return the callback that keeps these options in a run's folder."""
        return _Keep(folder / COMMAND, self._with_code())

    def _with_code(self) -> dict[str, Any]:
        return {**self.data, CODE: dict(self._code)}

    @contextmanager
    def kept_if_rescued(self) -> Iterator[None]:
        """Keep these options also in the folder that takes the place of one that is gone."""
        try:
            yield
        except FolderGoneError as error:
            _write(error.kept / COMMAND, self._with_code())
            raise


def _write(path: Path, typed: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(dict(typed), indent=2) + "\n").encode())


class _Keep(Callback):
    def __init__(self, path: Path, typed: dict[str, Any]) -> None:
        self._path = path
        self._typed = typed
        self._is_kept = False

    def on_record(self, record: Record) -> None:
        """Write with the first record: a run that never began leaves no folder."""
        if not self._is_kept:
            _write(self._path, self._typed)
            self._is_kept = True


def _is_elsewhere(folder: Path) -> bool:
    """Return whether a run is in the sight of rank 0 alone, and this is another one."""
    return os.environ.get("RANK", "0") != "0" and not (folder / RUN).exists()


def _read(folder: Path) -> dict[str, Any]:
    path = SavedRun(folder).path / COMMAND
    if not path.exists():
        return {}
    try:
        typed: dict[str, Any] = read_json(path)
    except (OSError, ContentError) as error:
        raise UsageError(f"cannot read {path}: {error}; give every option again") from error
    _check(path, typed)
    return {name: value for name, value in typed.items() if value is not None}


def _check(path: Path, typed: object) -> None:
    """Refuse what no command has written."""
    if not isinstance(typed, dict):
        raise UsageError(f"{path} holds {type(typed).__name__}, expected options; give every option again")
    for name, value in typed.items():
        is_text = isinstance(value, str) or (value is None and name != CODE)
        if name == CODE:
            is_right = isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
        else:
            is_right = is_text if name in TEXTS else isinstance(value, str | bool | int | float | None)
        if not is_right:
            raise UsageError(f"{path}: {name} = {str(value)[:40]!r}, expected what was typed; give every option again")


def _missing(names: list[str], resumed: Path | None) -> str:
    wanted = ", ".join(name.upper() if name == "job" else f"--{name}" for name in names)
    if resumed is None:
        return f"{wanted} missing; type paceline train JOB --protocol bsp --cluster local:4 --stop loss=0.2"
    if _is_elsewhere(resumed):
        here = f"{resumed} here, on rank {os.environ['RANK']}"
        return f"there is no run in {here}; let it be seen, or give {wanted} as on rank 0"
    main = SavedRun(resumed).configuration.get("main_module")
    if "job" in names and main:
        return (
            f"{resumed} was trained from Python, and its job is defined in {main}, which cannot be imported: resume it "
            f"there, with pl.train(job, ..., resume={str(resumed)!r})"
        )
    return f"{resumed} was not begun by paceline train, so {wanted} must be given as it was begun"
