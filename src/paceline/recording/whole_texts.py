"""Whole texts of errors that are shortened everywhere else: files in the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.bounds import LONGEST_TEXT
from paceline.utils.files import create_file, refuse_link
from paceline.utils.wording import printable

ERRORS = "errors"
MOST_FILES = 20
CHUNK = 1 << 16  # characters that are made printable at once


class WholeTexts:
    """Writer of the texts that are too long to be shown.

    Args:
        folder: folder of the run; None for a run without one.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def shortened(self, text: str, sender: str) -> str:
        """Return a text that is short and printable; a longer one names the file that has all of it.

        Args:
            text: text of another process.
            sender: name of the process, as in "worker-3".
        """
        shown = printable(text, LONGEST_TEXT)
        if len(text) <= LONGEST_TEXT or self._folder is None or not self._folder.is_dir():
            return shown
        where = f"... ({self._write(self._folder / ERRORS, text, sender)})"
        return shown[: LONGEST_TEXT - len(where)] + where

    def _write(self, folder: Path, text: str, sender: str) -> str:
        """Write a text to a new file; return where it is, or why it is nowhere."""
        try:
            refuse_link(folder)
            folder.mkdir(exist_ok=True)
            count = len(os.listdir(folder))
            if count >= MOST_FILES:
                return f"{folder} has {count} whole texts already"
            path = folder / f"{sender}-{count + 1}.txt"
            with create_file(path) as file:
                for start in range(0, len(text), CHUNK):
                    file.write(printable(text[start : start + CHUNK]).encode(errors="replace"))
        except OSError as error:
            return f"the whole text cannot be written: {error.strerror}"
        return f"the whole text is in {path}"
