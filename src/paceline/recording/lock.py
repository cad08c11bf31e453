"""Lock of a folder, for a single writer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from paceline.errors import UsageError


class FolderLock:
    """Exclusive lock of a folder, held until `release` or the end of the process.

    Args:
        path: folder, which must exist.
        what: name of the activity in the folder, for the error of other processes.

    Raises:
        UsageError: another process holds the lock.
        OSError: the folder cannot be opened.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UsageError(f"{what} is writing to {path}; wait for its end, or give another folder") from error

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


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
