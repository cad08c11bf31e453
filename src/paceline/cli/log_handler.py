"""Log records of paceline on standard error, while a command runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.text import Text

from paceline.recording.callbacks.progress_line import stderr_console
from paceline.utils.wording import printable

LOG = logging.getLogger("paceline")


class TerminalHandler(RichHandler):
    """Log handler that writes time, level and message on one line; above the progress line if there is one."""

    def __init__(self) -> None:
        console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())  # a file or a pipe gets whole lines
        super().__init__(console=console, highlighter=NullHighlighter())
        self.setFormatter(logging.Formatter(datefmt="%H:%M:%S"))

    def render(self, *, record: logging.LogRecord, **_: object) -> Text:
        """Return the line of a record, with rich's colours of time and level."""
        assert self.formatter is not None
        time = self.formatter.formatTime(record, self.formatter.datefmt)
        level = (record.levelname, f"logging.level.{record.levelname.lower()}")
        return Text.assemble((time, "log.time"), " ", level, " ", printable(self.format(record)))


@contextmanager
def logging_to_terminal() -> Iterator[None]:
    """Show warnings and errors of paceline's loggers on standard error until the context is left."""
    handler, level_before = TerminalHandler(), LOG.level
    LOG.addHandler(handler)
    set_verbosity()
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level_before)


def set_verbosity(*, verbose: bool = False, quiet: bool = False) -> None:
    """Choose the least severe records that are shown: warnings, unless one of the options is given."""
    LOG.setLevel(logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING)


def is_quiet() -> bool:
    """Return whether only errors are shown."""
    return not LOG.isEnabledFor(logging.WARNING)


def progress_console() -> Console:
    """Return the console for progress lines, which prints nothing with ``--quiet``."""
    return Console(quiet=True) if is_quiet() else stderr_console()
