"""Recorded training runs by switch point, from CSV files."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, isnan
from pathlib import Path
from typing import NamedTuple

from paceline.errors import UsageError, describe_read_error
from paceline.utils.files import ContentError, open_table

PERCENT, FRACTION = "bsp_percent", "setting"


class RecordedRun(NamedTuple):
    """One finished run.

    Attributes:
        time_s: duration in seconds, > 0.
        accuracy: final accuracy as a share, in [0, 1]; nan if the run diverged.
    """

    time_s: float
    accuracy: float


Runs = Mapping[float, Sequence[RecordedRun]]


def read_recorded_runs(file: str | Path, leave_out: Mapping[str, Sequence[str]] | None = None) -> Runs:
    """Read recorded runs from a CSV file with a header.

    Args:
        file: file with the columns `setting`, the share of the workload under BSP (1 is BSP alone), or `bsp_percent`,
            the same in percent; `time_s`; and `accuracy`, a share, or nan for a run that diverged. Other columns are
            ignored.
        leave_out: rows to omit: for each column, its values in these rows.

    Returns:
        The runs by share of the workload under BSP, in the order of the file.

    Raises:
        UsageError: the file cannot be read, or has an error; with the line and the column.
    """
    try:
        with open_table(file, "utf-8-sig") as stream:  # spreadsheets write a byte-order mark
            return _read(csv.DictReader(stream, skipinitialspace=True), str(file), leave_out or {})
    except (OSError, ContentError, csv.Error) as error:
        raise UsageError(f"cannot read the runs in {file}: {describe_read_error(error)}; give a CSV file") from error


def percent(fraction: float) -> str:
    """Return a share of the workload as text in percent.

    >>> percent(0.0625)
    '6.25%'
    """
    return f"{100 * fraction:.6g}%"


def same_fraction(fraction: float) -> float:
    """Return a share of the workload, rounded, so that 33.3 % and 0.333 are the same share."""
    return round(fraction, 9)


def _read(reader: csv.DictReader[str], file: str, leave_out: Mapping[str, Sequence[str]]) -> Runs:
    columns = reader.fieldnames or ()
    which = _setting_column(columns, file)
    for column in leave_out:
        if column not in columns:
            raise UsageError(f"{file} has no column {column!r} for leave_out; it has {', '.join(columns)}")
    runs = defaultdict(list)
    for cells in reader:
        if None in cells:
            raise UsageError(
                f"{file}, line {reader.line_num}: more cells than columns in the header; correct the line, and write "
                "0.92, not 0,92"
            )
        if not any(cells[column] in values for column, values in leave_out.items()):
            where = f"{file}, line {reader.line_num}"
            run = RecordedRun(_time_s(cells["time_s"], where), _accuracy(cells["accuracy"], where))
            runs[_fraction(cells[which], which, where)].append(run)
    if not runs:
        left = " left" if leave_out else ""
        raise UsageError(f"{file} has no rows{left}; expected a line for each run")
    return runs


def _setting_column(columns: Sequence[str], file: str) -> str:
    which = [column for column in (FRACTION, PERCENT) if column in columns]
    missing = [column for column in ("time_s", "accuracy") if column not in columns]
    expected = f"expected a header with {FRACTION} (a share) or {PERCENT}, time_s and accuracy"
    if missing or not which:
        column = missing[0] if missing else f"{FRACTION} or {PERCENT}"
        raise UsageError(f"{file}, line 1: column {column} is missing; {expected}")
    if len(which) > 1:
        raise UsageError(f"{file}, line 1: {FRACTION} and {PERCENT} both give the share of BSP; remove one of them")
    return which[0]


def _fraction(cell: str | None, column: str, where: str) -> float:
    most = 100 if column == PERCENT else 1
    value = _number(cell, column, where)
    if not 0 <= value <= most:
        hint = f"; name the column {PERCENT} if these are percent" if 1 < value <= 100 else ""
        raise UsageError(f"{where}, column {column}: {value:g}, expected a number from 0 to {most}{hint}")
    return same_fraction(value / most)


def _time_s(cell: str | None, where: str) -> float:
    value = _number(cell, "time_s", where)
    if not 0 < value < inf:
        raise UsageError(f"{where}, column time_s: {value:g}, expected seconds > 0")
    return value


def _accuracy(cell: str | None, where: str) -> float:
    value = _number(cell, "accuracy", where)
    if not (0 <= value <= 1 or isnan(value)):
        hint = f"; divide percent by 100, as {value / 100:g}" if 1 < value <= 100 else ""
        raise UsageError(f"{where}, column accuracy: {value:g}, expected a share from 0 to 1{hint}")
    return value


def _number(cell: str | None, column: str, where: str) -> float:
    try:
        return float(cell or "")
    except ValueError:
        raise UsageError(f"{where}, column {column}: {cell or ''!r} is not a number; correct the line") from None
