"""One writer a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from paceline.errors import UsageError


class FolderLock:
    """Keeps others out of a folder until it is released or this process ends.

    Args:
        path: of the folder, which must exist.
        what: that is going on in it, for the message to others.

    Raises:
        UsageError: somebody else is at work there.
        OSError: the folder cannot be opened.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UsageError(f"{what} is going on in {path}; wait for its end, or give another folder") from error

    def release(self) -> None:
        """Let others work in the folder."""
        os.close(self._descriptor)
