"""Token of a job on one host: a file that only processes of the same user can read.

Rank 0 makes a random token and writes it before it listens; the other ranks read it. The name of the file follows from
``MASTER_PORT``, the run id and the restart count, so that two runs of one user at the same time have different files.
A file that a killed run has left is replaced. A rank that has read the old token fails in the handshake, and reads the
file again for its next attempt.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.clusters.job_token import make_token
from paceline.clusters.launch_env import TOKEN, LaunchEnv
from paceline.errors import UsageError, describe_read_error

MOST_BYTES = 256
FOLDER_MODE, FILE_MODE, MODE_BITS = 0o700, 0o600, 0o777
INSTEAD = f"or set {TOKEN} to the same value for every rank"


def create_token(ranks: LaunchEnv) -> str:
    """Return a new token, which other ranks of this user can read from now on; an older file is replaced.

    Raises:
        UsageError: the folder is not private to this user, or cannot be written.
    """
    token, path = make_token(), token_path(ranks)
    with _private_folder(path.parent, create=True) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)  # `remove_token` compares and removes under the same lock
        unfinished = f".{secrets.token_hex(8)}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(token)
            os.replace(unfinished, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(unfinished, dir_fd=folder)
            raise
    return token


def read_token(ranks: LaunchEnv) -> str | None:
    """Return the token of the job, or None if rank 0 has not written it yet.

    Raises:
        UsageError: the folder or the file is not private to this user, or cannot be read.
    """
    path = token_path(ranks)
    with suppress(FileNotFoundError), _private_folder(path.parent, create=False) as folder:
        return _read(folder, path) or None
    return None


def remove_token(ranks: LaunchEnv, token: str) -> None:
    """Remove the file at the end of the run, unless another run has replaced it.

    Raises:
        UsageError: the folder or the file is not private to this user, or cannot be written.
    """
    path = token_path(ranks)
    with suppress(FileNotFoundError), _private_folder(path.parent, create=False) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)  # no other run replaces the file between the two steps
        if _read(folder, path) == token:
            os.unlink(path.name, dir_fd=folder)


def token_path(ranks: LaunchEnv) -> Path:
    """Return the place of the file: below ``XDG_RUNTIME_DIR`` if it is a folder of this user, else below ``/tmp``."""
    run = hashlib.sha256(ranks.run_id.encode()).hexdigest()[:16]
    return _folder() / f"{ranks.master[1]}-{run}-{ranks.restarts}.token"


def _folder() -> Path:
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with suppress(OSError):
        if runtime.is_absolute() and runtime.is_dir() and runtime.stat().st_uid == os.geteuid():
            return runtime / "paceline"
    return Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}"


@contextmanager
def _private_folder(path: Path, *, create: bool) -> Iterator[int]:
    """Yield a descriptor of a folder that only this user can read, write and search.

    Raises:
        FileNotFoundError: the folder, or a file in it, is missing.
        UsageError: the folder is not private to this user, or an operation in it has failed.
    """
    try:
        if create:
            with suppress(FileExistsError):
                path.mkdir(FOLDER_MODE)
        _check_private(path, path.lstat(), stat.S_IFDIR, FOLDER_MODE)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _check_private(path, os.fstat(descriptor), stat.S_IFDIR, FOLDER_MODE)  # it may have been replaced
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise
        raise UsageError(
            f"cannot use {path} for the token of this job ({describe_read_error(error)}): make its parent a writable "
            f"folder, {INSTEAD}"
        ) from error


def _read(folder: int, path: Path) -> str:
    """Return the content of a private file in an open folder.

    Raises:
        OSError: the file cannot be read.
        UsageError: the file is not private to this user.
    """
    _check_private(path, os.lstat(path.name, dir_fd=folder), stat.S_IFREG, FILE_MODE)
    descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)  # a link may have replaced the file
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MOST_BYTES).decode("ascii", errors="replace")


def _check_private(path: Path, found: os.stat_result, kind: int, mode: int) -> None:
    """Check that a folder or a file is of this kind, belongs to this user, and has this mode.

    Raises:
        UsageError: it is not private to this user.
    """
    name = "folder" if kind == stat.S_IFDIR else "file"
    if stat.S_IFMT(found.st_mode) != kind:
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else f"no {name}"
        raise UsageError(
            f"{path} for the token of this job is {what}, expected a {name} of this user: remove it, {INSTEAD}"
        )
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"{path} for the token of this job belongs to user {found.st_uid}, expected user {os.geteuid()}: set "
            f"XDG_RUNTIME_DIR to a folder of this user, {INSTEAD}"
        )
    if found.st_mode & MODE_BITS != mode:
        raise UsageError(
            f"{path} for the token of this job has mode {found.st_mode & MODE_BITS:o}, expected {mode:o}: type "
            f"chmod {mode:o} {path}, {INSTEAD}"
        )
