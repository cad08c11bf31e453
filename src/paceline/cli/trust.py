"""Trust in the folder of a run: whether a resume may import the job that the folder names."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UsageError
from paceline.jobs.registry import own_module
from paceline.recording.source_digest import KNOWN_BY_VERSION, CodeFile, code_behind

TRUST = "PACELINE_TRUST"
INSTALLED = {"site-packages", "dist-packages"}


def code_of_job(job: str) -> dict[str, str]:
    """Return a digest, by module, of each file that importing a job of the user's executes; import nothing."""
    return {name: file.digest for name, file in _files(job).items()}


def is_trusted(given: bool) -> bool:
    """Return whether the user trusts the folder: by --trust, or by the environment.

    Raises:
        UsageError: the environment says neither yes nor no.
    """
    value = os.environ.get(TRUST, "")
    if value not in {"", "0", "1"}:
        raise UsageError(f"{TRUST}={value!r}, expected 1 to trust the folder of a run that is resumed, or nothing")
    return given or value == "1"


def check_folder(folder: Path, file: Path, job: str, recorded: Mapping[str, str] | None, *, trusted: bool) -> None:
    """Print which file a resume imports the folder's job from; refuse a folder or code that may not be the user's.

    Args:
        folder: of the run.
        file: in it, which names the job.
        job: as the folder names it.
        recorded: digests by module, of when the run began; None if the folder has none.
        trusted: whether nothing is refused.

    Raises:
        UsageError: folder or file may be written by another user, or the code is not the recorded one, lies in the
            folder itself or is that of an installed package.
    """
    module = own_module(job)
    if module is None:
        return
    files = _files(job)
    where = files[module].path if module in files else "nowhere on Python's path"
    if os.environ.get("RANK", "0") == "0":
        print(f"paceline: {folder} names the job {job}, imported from {where}", file=sys.stderr)
    doubts = _of_others(folder) or _of_others(file) or _doubt(folder, module, files, recorded)
    if doubts and not trusted:
        raise UsageError(
            f"{doubts}; if you trust the folder and that code, add --trust (or set {TRUST}=1), or type the job: "
            f"paceline train '{job}' --resume {folder}"
        )


def _files(job: str) -> dict[str, CodeFile]:
    module = own_module(job)
    return code_behind(module) if module else {}


def _of_others(path: Path) -> str:
    """Return in words which other users may have written a folder or a file; empty if none."""
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    return f"{path} can be written by every user of this machine" if status.st_mode & stat.S_IWOTH else ""


def _is_installed(path: Path) -> bool:
    """Return whether a file is of an installed package: its digest is public, so it shows nothing about the folder."""
    return not INSTALLED.isdisjoint(path.parts)


def _doubt(folder: Path, module: str, files: Mapping[str, CodeFile], recorded: Mapping[str, str] | None) -> str:
    if module.partition(".")[0] in KNOWN_BY_VERSION or any(_is_installed(file.path) for file in files.values()):
        return f"{folder} names a job in {module}, which is no module of yours"
    if recorded is None:
        return f"{folder} is of an earlier paceline and has no digest of the code of its job"
    for name, file in files.items():
        if folder.resolve() in file.path.resolve().parents:
            return f"{file.path}, which would be imported, lies in the folder of the run"
        if file.digest != recorded.get(name):
            return f"{file.path} has changed since the run began: digest {recorded.get(name)}, now {file.digest}"
    missing = sorted(recorded.keys() - files.keys())
    return f"{', '.join(missing)} cannot be found, which {folder} was begun with" if missing else ""
