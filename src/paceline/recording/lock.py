"""Lock of a folder, for a single writer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from weakref import WeakSet

from paceline.errors import UsageError


class FolderLock:
    """Exclusive lock of a folder, held until `release` or the end of the process, whatever it has forked.

    Args:
        path: folder, which must exist.
        what: name of the activity in the folder, for the error of other processes.

    Raises:
        UsageError: another process holds the lock.
        OSError: the folder cannot be opened.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDONLY)
        _held.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UsageError(f"{what} is writing to {path}; wait for its end, or give another folder") from error

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


_held: WeakSet[FolderLock] = WeakSet()


def _release_in_child() -> None:
    """Give up the descriptors of a forked process, with which it would hold the locks after the end of its parent."""
    for lock in _held:
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a folder; the locks of other hosts may be invisible.

    The test itself holds a shared lock for an instant, in which no run can begin in this folder.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
