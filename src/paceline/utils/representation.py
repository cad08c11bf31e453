"""Representations of results: a line for repr, a text for print, a table for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from textwrap import wrap
from typing import Any

from paceline.utils.files import in_unicode
from paceline.utils.text_table import TextTable, paragraph
from paceline.utils.wording import in_one_line

LONGEST = 60
MOST = 8
COLUMNS = 80


class Representation:
    """Base class of results; a subclass returns the names and values to show."""

    def _facts(self) -> Mapping[str, object]:
        """Return the values that identify the result, by name; `summarize_value` shortens each."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = ", ".join(f"{name.replace(' ', '_')}={summarize_value(value)}" for name, value in self._facts().items())
        return f"{type(self).__name__}({facts})"

    def __str__(self) -> str:
        facts = {name.replace("_", " "): value for name, value in self._facts().items()}
        width = max(map(len, facts), default=0)
        lines = (f"  {name:{width}}  {_in_full(value, indent=width + 4)}" for name, value in facts.items())
        return "\n".join([type(self).__name__, *lines])

    def _repr_html_(self) -> str:
        """Return the HTML table for a notebook."""
        rows = [[name.replace("_", " "), summarize_value(value)] for name, value in self._facts().items()]
        return f"<div><strong>{type(self).__name__}</strong>{TextTable(['', ''], rows, left=(0, 1)).html()}</div>"


class TableRepresentation(Representation):
    """Base class of results with tables and notes."""

    def _title(self) -> str:
        """Return the sentence above the tables; empty for none."""
        return ""

    def _grids(self) -> Sequence[TextTable]:
        """Return the tables."""
        raise NotImplementedError

    def _notes(self) -> Sequence[str]:
        """Return the sentences below the tables."""
        return ()

    def text(self) -> str:
        """Return the title, the tables and the notes, in lines of at most 80 columns."""
        title = [paragraph(self._title())] if self._title() else []
        tables = ["\n".join(grid.text()) for grid in self._grids()]
        notes = ["\n".join(map(paragraph, self._notes()))] if self._notes() else []
        return in_unicode("\n\n".join([*title, *tables, *notes]) + "\n")

    def __str__(self) -> str:
        return self.text().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook."""
        parts = [f"<p>{escape(self._title())}</p>"] if self._title() else []
        parts += [grid.html() for grid in self._grids()]
        parts += [f"<p>{'<br>'.join(map(escape, self._notes()))}</p>"] if self._notes() else []
        return in_unicode(f"<div>{''.join(parts)}</div>")


def _in_full(value: object, indent: int) -> str:
    """Return a value as `summarize_value` does, but a text in full, in lines of at most 80 columns."""
    if not isinstance(value, str) or not value:
        return summarize_value(value)
    return f"\n{' ' * indent}".join(
        wrap(in_unicode(value), COLUMNS - indent, break_long_words=False, break_on_hyphens=False)
    )


def summarize_value(value: object) -> str:
    """Return a value in one short line: six digits of a number, the name of a function, the size of a container.

    >>> from functools import partial
    >>> summarize_value(0.123456789), summarize_value("a" * 99)[-6:], summarize_value(partial(sorted, reverse=True))
    ('0.123457', 'aaa...', 'sorted(reverse=True)')
    >>> summarize_value(list(range(1000)))
    'list of 1000'
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return _cut("{" + ", ".join(f"{name}: {summarize_value(each)}" for name, each in value.items()) + "}")
    if isinstance(value, partial):
        return _cut(_call(value))
    if isinstance(value, list | tuple):
        listed = f"[{', '.join(map(summarize_value, value))}]" if len(value) <= MOST else ""
        return listed if listed and len(listed) <= LONGEST else f"{type(value).__name__} of {len(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return _cut(value.__qualname__)
    if hasattr(value, "shape"):  # an array or a tensor
        return f"{type(value).__name__} of {list(value.shape)}"
    if type(value).__repr__ is object.__repr__ or callable(value):  # the repr of a module has all its layers
        return type(value).__name__
    return _cut(in_unicode(str(value)))


def _call(value: partial[Any]) -> str:
    given = [
        *map(summarize_value, value.args),
        *(f"{name}={summarize_value(each)}" for name, each in value.keywords.items()),
    ]
    return f"{summarize_value(value.func)}({', '.join(given)})"


def _cut(text: str) -> str:
    return in_one_line(text, LONGEST)
