"""Text that fits the terminal: broken between words there, and left as it is in a file or a pipe."""

from __future__ import annotations

import shutil
from textwrap import wrap
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
    lines = (
        wrap(
            line, width, subsequent_indent=margin, drop_whitespace=True, break_long_words=False, break_on_hyphens=False
        )
        for line in text.splitlines()
    )
    return "\n".join("\n".join(line) for line in lines)
