"""Tables of results: text of 80 columns, wrapped between words only, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import isnan
from textwrap import wrap

WIDTH = 80
GAP = "  "


@dataclass(frozen=True)
class TextTable:
    """Table with names in the first column and short values in the others.

    Attributes:
        head: heading of each column; a newline breaks it.
        rows: rows with one cell per column.
        left: indices of left-aligned columns, >= 0; the others are right-aligned.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)

    def text(self, width: int = WIDTH) -> tuple[str, str]:
        r"""Return the headings and the rows as lines of at most `width` columns.

        A name that is too long for its column is wrapped between words, or has its own line if one word is too long.
        Values are never wrapped.

        >>> head, rows = TextTable(["protocol", "s"], [["bsp", "12.5"], ["bsp@25% >> asp", "7.5"]]).text(width=14)
        >>> print(head, rows, sep="\n")
        protocol     s
        bsp       12.5
        bsp@25%    7.5
        >> asp
        """
        widths = [self._width_of(column) for column in range(1, len(self.head))]
        room = width - sum(len(GAP) + each for each in widths)
        names = [wrap(row[0], max(room, 1), break_long_words=False, break_on_hyphens=False) for row in self.rows]
        fitting = [len(line) for lines in names for line in lines if len(line) <= room]
        first = max([*fitting, *(len(line) for line in self.head[0].split("\n") if len(line) <= room)], default=0)
        head = [line for cells in self._head_cells() for line in self._lines(cells, [first, *widths])]
        body = [line for row in self.rows for line in self._lines(row, [first, *widths], width)]
        return "\n".join(head), "\n".join(body)

    def html(self) -> str:
        """Return an HTML table with escaped cells."""
        head = "".join(f"<th{self._style(i)}>{escape(cell).strip()}</th>" for i, cell in enumerate(self.head))
        body = "".join(
            f"<tr>{''.join(f'<td{self._style(i)}>{escape(cell)}</td>' for i, cell in enumerate(row))}</tr>"
            for row in self.rows
        )
        shown = f"<thead><tr>{head}</tr></thead>" if any(self.head) else ""
        return f"<table>{shown}<tbody>{body}</tbody></table>"

    def _style(self, column: int) -> str:
        return f' style="text-align:{"left" if column in self.left else "right"}"'

    def _width_of(self, column: int) -> int:
        cells = [*self.head[column].split("\n"), *(row[column] for row in self.rows)]
        return max(map(len, cells))

    def _head_cells(self) -> Iterator[list[str]]:
        """Yield the lines of the headings, aligned at the last line."""
        parts = [heading.split("\n") for heading in self.head]
        deepest = max(map(len, parts))
        for i in range(deepest):
            yield [part[i - deepest + len(part)] if i >= deepest - len(part) else "" for part in parts]

    def _lines(self, cells: Sequence[str], widths: Sequence[int], width: int = WIDTH) -> list[str]:
        name, *values = cells
        lines = wrap(name, max(widths[0], 1), break_long_words=False, break_on_hyphens=False) or [""]
        if max(map(len, lines)) > widths[0]:
            lines = [*wrap(name, width, break_long_words=False, break_on_hyphens=False), ""]
            at = len(lines) - 1
        else:
            at = 0
        lines[at] = GAP.join(
            value.ljust(space) if column in self.left else value.rjust(space)
            for column, (value, space) in enumerate(zip([lines[at], *values], widths, strict=True))
        )
        return [line.rstrip() for line in lines]


def paragraph(text: str, width: int = WIDTH) -> str:
    """Return a text in lines of at most `width` columns, wrapped between words only.

    >>> print(paragraph("bsp, seed 0 failed: ValueError", width=20))
    bsp, seed 0 failed:
    ValueError
    """
    return "\n".join(wrap(text, width, break_long_words=False, break_on_hyphens=False))


NONE = "-"


def number(value: float | None) -> str:
    """Return a number with three significant digits or more.

    >>> [number(value) for value in (1234.5, 56.78, 0.012345, 0, None)]
    ['1234', '56.8', '0.0123', '0', '-']
    """
    if value is None or isnan(value):
        return NONE
    return f"{value:.0f}" if value == 0 or value >= 99.95 else f"{value:#.3g}"


def whole(value: float | None) -> str:
    """Return a whole number in full, and other numbers as `number` does."""
    return f"{value:.0f}" if value is not None and float(value).is_integer() else number(value)
