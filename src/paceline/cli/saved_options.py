"""Options of `paceline train`, saved in the folder of the run so that `--resume` needs no other option."""

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
from paceline.recording.script_runs import refuse_to_resume
from paceline.user_loop.data.loop_data import ATTACHED
from paceline.utils.files import ContentError, read_json, replace_file

COMMAND = "command.json"
CODE = "code"
NEEDED = ("job", "protocol", "cluster", "stop")
TEXTS = (*NEEDED, "evaluate_every", "checkpoint_every", "censored", "lr_rule", "lr_of", "metrics")
DEFAULTS = {"seed": 0, "checkpoint_every": "seconds=60", "keep_checkpoints": 3}


class SavedOptions(UserDict[str, Any]):
    """Options of one command; None for an option that was not given."""

    _code: Mapping[str, str] = {}  # digest of each module of the job, taken before the job is imported

    def completed(self, resumed: Path | None, *, trust: bool = False) -> Self:
        """Complete the options with those of the resumed run and with the defaults.

        A given option overrides the saved one. Only rank 0 needs the folder: a rank that cannot read it uses its own
        options, and the handshake with rank 0 compares them.

        Args:
            resumed: folder of the run; None for a new run.
            trust: whether to import a job named only by the folder without checking the folder and the code.

        Raises:
            UsageError: a required option is missing, or the folder is not trusted.
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
            if whole["job"] is not None:
                _check_job_name(whole["job"])
            raise UsageError(_missing(missing, resumed))
        whole._code = code_of_job(whole["job"])
        return whole

    def saver(self, folder: Path) -> Callback:
        """Return the callback that saves these options in the folder of a run."""
        return _OptionsSaver(folder / COMMAND, self._with_code())

    def _with_code(self) -> dict[str, Any]:
        return {**self.data, CODE: dict(self._code)}

    @contextmanager
    def saved_if_rescued(self) -> Iterator[None]:
        """Save the options also in the folder that replaces a deleted one."""
        try:
            yield
        except FolderGoneError as error:
            _write(error.kept / COMMAND, self._with_code())
            raise


def _write(path: Path, options: Mapping[str, Any]) -> None:
    replace_file(path, (json.dumps(dict(options), indent=2) + "\n").encode())


class _OptionsSaver(Callback):
    """Callback that saves options with the first record: a run that never started leaves no folder."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path = path
        self._typed = options
        self._is_saved = False

    def on_record(self, record: Record) -> None:
        """Save the options, once."""
        if not self._is_saved:
            _write(self._path, self._typed)
            self._is_saved = True


def _is_elsewhere(folder: Path) -> bool:
    """Return whether only rank 0 can read the folder, and this is another rank."""
    return os.environ.get("RANK", "0") != "0" and not (folder / RUN).exists()


def _read(folder: Path) -> dict[str, Any]:
    saved = SavedRun(folder)
    refuse_to_resume(saved.configuration, folder)
    path = saved.path / COMMAND
    if not path.exists():
        return {}
    try:
        options: dict[str, Any] = read_json(path)
    except (OSError, ContentError) as error:
        raise UsageError(f"cannot read {path}: {error}; give all options again") from error
    _check(path, options)
    return {name: value for name, value in options.items() if value is not None}


def _check(path: Path, options: object) -> None:
    """Check the content of a file of options."""
    if not isinstance(options, dict):
        raise UsageError(f"{path} holds {type(options).__name__}, expected options; give all options again")
    for name, value in options.items():
        is_text = isinstance(value, str) or (value is None and name != CODE)
        if name == CODE:
            is_right = isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
        else:
            is_right = is_text if name in TEXTS else isinstance(value, str | bool | int | float | None)
        if not is_right:
            raise UsageError(f"{path}: {name} = {str(value)[:40]!r}, which is no valid value; give all options again")


def _check_job_name(job: str) -> None:
    from paceline.jobs.registry import check_job_name  # which imports torch

    check_job_name(job)


def _missing(names: list[str], resumed: Path | None) -> str:
    wanted = ", ".join(name.upper() if name == "job" else f"--{name}" for name in names)
    if resumed is None:
        if "job" in names:
            return "JOB missing; for example: paceline train digits"
        return f"{wanted} missing; for example: paceline train JOB --stop loss=0.2,epochs=10"
    if _is_elsewhere(resumed):
        here = f"{resumed} here, on rank {os.environ['RANK']}"
        return f"there is no run in {here}; share that folder, or give {wanted} as on rank 0"
    configuration = SavedRun(resumed).configuration
    if configuration.get("job") == ATTACHED:
        return (
            f"{resumed} is the run of a loop that pl.attach has attached: start its script with "
            f"attach(..., resume={str(resumed)!r})"
        )
    main = configuration.get("main_module")
    if "job" in names and main:
        return (
            f"{resumed} was started from Python with a job defined in {main}, which cannot be imported; resume it "
            f"there: pl.train(job, ..., resume={str(resumed)!r})"
        )
    return f"{resumed} was not started by paceline train: give {wanted} with the values of that run"
