"""Text that fits the terminal: broken between words there, and left as it is in a file or a pipe."""

from __future__ import annotations

import shutil
from textwrap import TextWrapper
from typing import TextIO


def fitted(text: str, stream: TextIO, indent: int = 0) -> str:
    """Return a text for a stream: in lines of the terminal's width if it is a terminal.

    Args:
        text: lines, each of which is broken on its own.
        stream: where it is going to be written.
        indent: columns by which the later lines of a broken one are indented.
    """
    if not stream.isatty():
        return text
    width, margin = shutil.get_terminal_size().columns, " " * indent
    broken = TextWrapper(width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)
    return "\n".join(broken.fill(line) for line in text.splitlines())
