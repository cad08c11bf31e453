"""Traces: the recorded round trips of a run, as CSV, for replay under another protocol."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, field, replace
from hashlib import sha256
from io import StringIO
from itertools import pairwise
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from paceline.core.records import DecisionMade, GradientArrived, Record, WorkInterrupted, WorkUnfinished
from paceline.errors import UsageError, describe_read_error
from paceline.utils.checked_dataclass import checked_dataclass
from paceline.utils.files import ContentError, open_table, write_out
from paceline.utils.validation import check_range

WHOLE = {"worker": "[0, inf)", "draw": "[1, inf)", "censored": "[0, 1]"}
ROUNDING = 1e-6  # relative; a trace may have passed through a program that keeps six digits


class TraceRow(NamedTuple):
    """One recorded round trip.

    Attributes:
        worker: id of the worker, >= 0.
        draw: number of the gradient computation of this worker, >= 1.
        start_s: time at which the worker received the task, seconds since the run began.
        pull_s: seconds until the worker had the parameters; 0 if censored.
        compute_s: seconds of computing, before any barrier; all observed seconds if censored.
        push_s: seconds until the server had the gradient; 0 if censored.
        end_s: time at which the server had processed the gradient, including the update that it completed; if censored,
            the time at which the work was interrupted.
        censored: 1 if the gradient never arrived, so that the work lasts longer than end_s - start_s; else 0.
        sum_s: without a server, seconds of the sum that contains the gradient, from the last contribution; 0 if there
            was none. Then pull_s and push_s are 0, end_s is the time of the sum, and start_s the latest time at which
            the worker began, which may be before the end of the previous row.
    """

    worker: int
    draw: int
    start_s: float
    pull_s: float
    compute_s: float
    push_s: float
    end_s: float
    censored: int
    sum_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end."""
        return self.end_s - self.start_s

    @property
    def waited_s(self) -> float:
        """Seconds outside the parts, which are waiting in the queue of the server and the update."""
        # The simulator adds in this order, so that the result is exactly 0 if there was no waiting.
        return self.end_s - (self.start_s + (self.pull_s + self.push_s + self.compute_s)) - self.sum_s


*WITH_SERVER, LAST = TraceRow._fields  # columns of a trace; the last one only without a server


class HasHistory(Protocol):
    """A finished run, or the folder of one."""

    @property
    def history(self) -> Iterable[Record]:
        """Records of the run."""


@checked_dataclass(frozen=True)
class Trace:
    """Trace: the round trips of a run, for use as the timing of a `Cluster`.

    Args:
        rows: round trips in any order; stored sorted by worker and draw.
        by: row that a task replays: by "draw", the d-th row of the worker for its d-th task; by "time", the row in
            progress at that time. After the last row the rows repeat, with a warning.
        censored: rule for the duration of censored work: "km" samples it from a Kaplan-Meier fit of the worker's round
            trips, given the observed time. None has no rule, and a run that needs such a duration is refused.
        has_server: whether the run had a server. With a server the trace has pulls and pushes, without one only sums.
        sums_as_transfers: whether a protocol with a server may replay sums: half of a sum as a pull, half as a push.
        source: origin of the trace, for messages.

    Raises:
        UsageError: a row is invalid or contradicts another one, or no row is finished.

    >>> trace = Trace([TraceRow(0, 1, start_s=0.0, pull_s=0.1, compute_s=0.7, push_s=0.2, end_s=1.0, censored=0)])
    >>> trace.workers
    1
    """

    rows: Sequence[TraceRow]
    _: KW_ONLY
    by: Literal["draw", "time"] = "draw"
    censored: Literal["km"] | None = None
    has_server: bool = True
    sums_as_transfers: bool = False
    source: str = field(default="a trace", compare=False)

    def __post_init__(self) -> None:
        _check_rows(self.rows, self.source)
        if all(row.censored for row in self.rows):
            raise UsageError(f"{self.source} has no finished round trip; record a longer run")
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=lambda row: (row.worker, row.draw))))

    def __repr__(self) -> str:
        digest = sha256(repr(self.rows).encode()).hexdigest()[:8]
        knobs = f"by={self.by!r}, censored={self.censored!r}, digest={digest}"
        return f"Trace({self.source!r}, {self.workers} workers, {len(self.rows)} rows, {knobs})"

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.rows[-1].worker + 1

    @property
    def censored_rows(self) -> int:
        """Number of censored rows."""
        return sum(row.censored for row in self.rows)

    @property
    def is_certain(self) -> bool:
        """Whether the duration of every row but each worker's last is known or sampled."""
        between = (row for row, after in pairwise(self.rows) if row.worker == after.worker)
        return self.censored == "km" or not any(row.censored for row in between)

    @classmethod
    def of(cls, run: Iterable[Record] | HasHistory, *, source: str = "the run") -> Trace:
        """Extract the round trips of a run.

        Work that was interrupted or never finished is censored, unless its gradient arrived later. A gradient of a
        share of a minibatch, as under `balanced`, has the compute time of a whole one, in proportion to the samples.

        Args:
            run: history of the run, or a `Result` or `SavedRun`.
            source: origin of the trace, for messages.

        Raises:
            UsageError: the run has local steps, so that a round trip is not that of one gradient.
        """
        rows: dict[tuple[int, int], TraceRow] = {}
        has_server, has_shares, whole = True, False, 1
        for record in run if isinstance(run, Iterable) else run.history:
            if isinstance(record, GradientArrived) and record.minibatches > 1:
                raise UsageError(
                    f"{source} has local steps: a round trip has the time of {record.minibatches} gradients, and a "
                    "trace those of single ones; record a run without local steps"
                )
            if isinstance(record, DecisionMade) and record.kind == "shares":
                has_shares = True
            if isinstance(record, GradientArrived) and record.samples:
                if has_shares:
                    record = _of_whole(record, whole / record.samples)
                else:
                    whole = record.samples
            if isinstance(record, GradientArrived | WorkInterrupted | WorkUnfinished):
                rows[record.worker, record.draw] = _row(record)
                has_server &= not isinstance(record, GradientArrived) or isnan(record.sum_s)
        return cls(list(rows.values()), has_server=has_server, source=source)

    @classmethod
    def from_csv(
        cls, file: str | Path, *, by: Literal["draw", "time"] = "draw", censored: Literal["km"] | None = None
    ) -> Trace:
        """Read a trace from a CSV file, as ``paceline trace`` writes it.

        Args:
            file: path of the file.
            by: row that a task replays, as in `Trace`.
            censored: rule for the duration of censored work, as in `Trace`.

        Raises:
            UsageError: the file cannot be read, or has an error; with the line and the column.
        """
        try:
            with open_table(file) as stream:
                reader = csv.DictReader(stream)
                lines, rows = _read(reader, str(file))
        except (OSError, ContentError, csv.Error) as error:
            raise UsageError(f"cannot read the trace {str(file)!r}: {describe_read_error(error)}") from error
        try:
            has_server = LAST not in (reader.fieldnames or ())
            return cls(rows, by=by, censored=censored, has_server=has_server, source=str(file))
        except _WrongRowError as error:
            raise UsageError(f"{file}, line {lines[error.index]}, {error.text}") from error

    def to_csv(self, file: str | Path) -> None:
        """Write the rows to a CSV file, sorted by worker and draw; every number is read back exactly.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            stream = StringIO()
            writer = csv.writer(stream, lineterminator="\n")
            columns = len(WITH_SERVER) if self.has_server else len(TraceRow._fields)
            writer.writerow(TraceRow._fields[:columns])
            writer.writerows(row[:columns] for row in self.rows)
            write_out(Path(file), stream.getvalue().encode())
        except OSError as error:
            raise UsageError(f"cannot write the trace: {error}") from error


def _of_whole(record: GradientArrived, factor: float) -> GradientArrived:
    """Return the record of a gradient of a whole minibatch, which has more samples by this factor."""
    compute_s = record.compute_s * factor
    return replace(record, compute_s=compute_s, now_s=record.now_s + compute_s - record.compute_s)


def _row(record: GradientArrived | WorkInterrupted | WorkUnfinished) -> TraceRow:
    worker, draw, start_s, end_s = record.worker, record.draw, record.started_s, record.now_s
    if not isinstance(record, GradientArrived):
        return TraceRow(
            worker=worker,
            draw=draw,
            start_s=start_s,
            pull_s=0.0,
            compute_s=end_s - start_s,
            push_s=0.0,
            end_s=end_s,
            censored=1,
        )
    if not isnan(record.sum_s):
        compute_s = record.compute_s + record.left_over_s
        begun_s = max(0.0, min(start_s, end_s - record.sum_s - compute_s))
        end_s = max(end_s, begun_s + compute_s + record.sum_s)
        return TraceRow(
            worker=worker,
            draw=draw,
            start_s=begun_s,
            pull_s=0.0,
            compute_s=compute_s,
            push_s=0.0,
            end_s=end_s,
            censored=0,
            sum_s=record.sum_s,
        )
    unsent_s = 0.0 if isnan(record.unsent_s) else record.unsent_s  # another protocol may need the gradient itself
    push_s = record.push_s + unsent_s
    return TraceRow(
        worker=worker,
        draw=draw,
        start_s=start_s,
        pull_s=record.pull_s,
        compute_s=record.compute_s,
        push_s=push_s,
        end_s=end_s + unsent_s,
        censored=0,
    )


def _read(reader: csv.DictReader[str], file: str) -> tuple[list[int], list[TraceRow]]:
    """Return the line and the content of each row."""
    missing = [column for column in WITH_SERVER if column not in (reader.fieldnames or ())]
    if missing:
        expected = ",".join(WITH_SERVER)
        raise UsageError(f"{file}, line 1: column {missing[0]} is missing; expected {expected}")
    lines, rows = [], []
    for cells in reader:
        where = f"{file}, line {reader.line_num}"
        if None in cells:
            raise UsageError(f"{where}, column {len(reader.fieldnames or ()) + 1}: more cells than columns")
        columns = [column for column in TraceRow._fields if column in cells]
        rows.append(TraceRow(*(_number(cells[column], column, where) for column in columns)))
        lines.append(reader.line_num)
    if not rows:
        raise UsageError(f"{file} has no rows; expected a line for each round trip")
    return lines, rows


def _number(cell: str | None, column: str, where: str) -> Any:
    try:
        return int(cell or "") if column in WHOLE else float(cell or "")
    except ValueError:
        wanted = "a whole number" if column in WHOLE else "a number of seconds"
        raise UsageError(f"{where}, column {column}: {cell or ''!r} is not {wanted}") from None


class _WrongRowError(UsageError):
    """Error in one row of a trace, with its index, so that the reader of a file can name the line."""

    def __init__(self, index: int, text: str, source: str) -> None:
        super().__init__(f"{source}, row {index + 1}, {text}")
        self.index = index
        self.text = text


def _check_rows(rows: Sequence[TraceRow], source: str) -> None:
    known: set[tuple[int, int]] = set()
    workers = {row.worker for row in rows}
    for index, row in enumerate(rows):
        try:
            _check_row(row)
            _check_place(row, known, workers)
        except UsageError as error:
            raise _WrongRowError(index, f"column {error}", source) from error
        known.add((row.worker, row.draw))


def _check_row(row: TraceRow) -> None:
    for column, value in zip(TraceRow._fields, row, strict=True):
        try:
            check_range(WHOLE.get(column, "[0, inf)"), Integral if column in WHOLE else Real, **{column: value})
        except UsageError as error:
            raise UsageError(f"{column}: {error}") from error
    if row.end_s < row.start_s or (row.end_s == row.start_s and not row.censored):
        raise UsageError(f"end_s: {row.end_s!r} is not after start_s, {row.start_s!r}")
    if row.waited_s < -ROUNDING * max(row.end_s, row.total_s):
        parts_s = row.pull_s + row.compute_s + row.push_s + row.sum_s
        parts = "start_s + pull_s + compute_s + push_s" + (f" + {LAST}" if row.sum_s else "")
        raise UsageError(f"end_s: {row.end_s!r} is before {parts} = start_s + {parts_s!r}")


def _check_place(row: TraceRow, known: set[tuple[int, int]], workers: set[int]) -> None:
    if (row.worker, row.draw) in known:
        raise UsageError(f"draw: {row.draw} of worker {row.worker} occurs twice")
    if row.worker and row.worker - 1 not in workers:
        raise UsageError(f"worker: {row.worker}, but there is no worker {row.worker - 1}; number them from 0")
