"""Trust check before a resume imports the job that the folder of the run names."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.clusters.launch_env import is_rank_0
from paceline.errors import UsageError
from paceline.jobs.registry import user_module
from paceline.recording.source_digest import KNOWN_BY_VERSION, CodeFile, code_behind
from paceline.utils.wording import printable

TRUST = "PACELINE_TRUST"
INSTALLED = {"site-packages", "dist-packages"}


def code_of_job(job: str) -> dict[str, str]:
    """Return a digest of each file that importing a user's job executes, by module, without importing it."""
    return {name: file.digest for name, file in _files(job).items()}


def is_trusted(given: bool) -> bool:
    """Return whether the user trusts the folder, by ``--trust`` or by the environment variable.

    Raises:
        UsageError: the environment variable has another value than 0 or 1.
    """
    value = os.environ.get(TRUST, "")
    if value not in {"", "0", "1"}:
        raise UsageError(f"{TRUST}={value!r}, expected 1 to trust the resumed folder, else 0 or no value")
    return given or value == "1"


def check_folder(folder: Path, file: Path, job: str, recorded: Mapping[str, str] | None, *, trusted: bool) -> None:
    """Print the file that a resume will import the job from, and refuse a folder or code that may be someone else's.

    Args:
        folder: folder of the run.
        file: file in the folder that names the job.
        job: name of the job in that file.
        recorded: digests by module at the start of the run; None if the folder has none.
        trusted: whether to accept any folder and code.

    Raises:
        UsageError: another user can write the folder or the file; or the code has changed, lies in the folder itself,
            or belongs to an installed package.
    """
    module = user_module(job)
    if module is None:
        return
    files = _files(job)
    where = files[module].path if module in files else "no file on Python's path"
    if is_rank_0(os.environ):
        print(printable(f"paceline: {folder} names the job {job}, imported from {where}"), file=sys.stderr)
    reason = _writable_by_others(folder) or _writable_by_others(file) or _code_problem(folder, module, files, recorded)
    if reason and not trusted:
        raise UsageError(
            f"{reason}; if you trust the folder and the code, add --trust (or set {TRUST}=1), or name the job: "
            f"paceline train '{job}' --resume {folder}"
        )


def _files(job: str) -> dict[str, CodeFile]:
    module = user_module(job)
    return code_behind(module) if module else {}


def _writable_by_others(path: Path) -> str:
    """Return which other users may have written a folder or a file, as text; empty if none."""
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be written by every user of this machine"
    is_shared = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return f"{path} can be written by the members of group {status.st_gid}; type chmod g-w {path}" if is_shared else ""


def _is_own_group(number: int) -> bool:
    """Return whether a group is the private one of this user, which many systems make for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return user.pw_gid == number and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}


def _is_installed(path: Path) -> bool:
    """Return whether a file belongs to an installed package, whose digest is public and so proves nothing."""
    return not INSTALLED.isdisjoint(path.parts)


def _code_problem(folder: Path, module: str, files: Mapping[str, CodeFile], recorded: Mapping[str, str] | None) -> str:
    if module.partition(".")[0] in KNOWN_BY_VERSION or any(_is_installed(file.path) for file in files.values()):
        return f"{folder} names a job in {module}, which is not a module of yours"
    if recorded is None:
        return f"{folder} was written by an earlier paceline, without a digest of the code of its job"
    for name, file in files.items():
        if folder.resolve() in file.path.resolve().parents:
            return f"{file.path}, which would be imported, lies in the folder of the run"
        if file.digest != recorded.get(name):
            return f"{file.path} has changed since the run began: digest {recorded.get(name)}, now {file.digest}"
    missing = sorted(recorded.keys() - files.keys())
    return f"{', '.join(missing)} cannot be found, but {folder} was started with it" if missing else ""
