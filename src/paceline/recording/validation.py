"""Validation of a run's files: types in `run.json`, and types and order of the records in the log.

Only types, ranges and the order of records are checked. A check raises a `ContentError` without the name of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from math import inf
from typing import Annotated, Any, get_args

from msgspec import Meta, Struct, ValidationError, convert, defstruct

from paceline.coordinator.rules import Rules
from paceline.core.bounds import LARGEST, MOST_WORKERS, Whole
from paceline.core.records import Record, RunResumed, RunStarted, UpdateMade
from paceline.errors import PacelineError, UsageError
from paceline.recording.schema import upgrade
from paceline.utils.files import ContentError
from paceline.utils.wording import in_one_line, printable

SHOWN = 60

Type = Any  # for msgspec

WHOLE: Type = Whole
NUMBER: Type = float | Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]  # nan included
TIMEOUT: Type = Annotated[float, Meta(ge=0)]  # which refuses nan
WORKERS: Type = Annotated[int, Meta(ge=1, le=MOST_WORKERS)]

_BY_ANNOTATION: Mapping[str, Type] = {
    "float": NUMBER,
    "int": WHOLE,
    "bool": bool,
    "str": str,
    "int | None": WHOLE | None,
    "float | None": NUMBER | None,
    "Mapping[str, float]": dict[str, NUMBER],
    "Sequence[tuple[str, float]]": list[tuple[str, NUMBER]],
}


def _checked_fields(kind: type[Any]) -> type[Struct]:
    """Return the type of the fields of a record that are checked."""
    types = [(field.name, _BY_ANNOTATION.get(str(field.type))) for field in fields(kind)]
    return defstruct(kind.__name__, [(name, each) for name, each in types if each is not None])


_CHECKED: Mapping[type[Any], type[Struct]] = {kind: _checked_fields(kind) for kind in get_args(Record)}


def has_type(value: object, kind: Type) -> bool:
    """Return whether a value of a JSON file has a type; the types are those of msgspec, without conversions."""
    try:
        convert(value, kind)
    except ValidationError:
        return False
    return True


def check_types(record: Record) -> None:
    """Check that every field of a record has its annotated type.

    Raises:
        ContentError: a field has another type.
    """
    try:
        convert(record, _CHECKED[type(record)], from_attributes=True)
    except ValidationError as error:
        _, name = re.split(r"\W+", str(error).partition(" - at ")[2])[:2]  # of $.name
        raise ContentError(f"{name} = {repr(getattr(record, name))[:SHOWN]}") from None


class RecordOrder:
    """Checker of the order of records: a beginning, times that never decrease, and consecutive versions."""

    def __init__(self) -> None:
        self._now_s: float | None = None
        self._version = 0

    def check(self, record: Record) -> None:
        """Check the next record.

        Raises:
            ContentError: the record cannot come next.
        """
        if self._now_s is None and not isinstance(record, RunStarted):
            raise ContentError(f"{type(record).__name__} before the run has started")
        if not 0 <= record.now_s < inf or (self._now_s is not None and record.now_s < self._now_s):
            raise ContentError(f"its time is {record.now_s} s, after {self._now_s or 0} s")
        self._now_s = record.now_s
        started_s = getattr(record, "started_s", 0.0)
        if not started_s <= record.now_s:
            raise ContentError(f"work that began at {started_s} s ended at {record.now_s} s")
        worker: int = getattr(record, "worker", None) or 0
        if worker >= MOST_WORKERS:
            raise ContentError(f"worker {worker}, expected less than {MOST_WORKERS}")
        if isinstance(record, RunStarted | RunResumed) and not 1 <= record.workers <= MOST_WORKERS:
            raise ContentError(f"{record.workers} workers, expected 1 to {MOST_WORKERS}")
        if isinstance(record, UpdateMade):
            if record.version != self._version + 1:
                raise ContentError(f"version {record.version} follows version {self._version}")
            self._version = record.version


CONFIGURATION: Mapping[str, tuple[Type, str]] = {
    "schema": (WHOLE, "a whole number"),
    "job": (str, "text"),
    "protocol": (str, "text"),
    "cluster": (str, "text"),
    "stop": (str, "text"),
    "seed": (int, "a whole number"),
    "batch_size": (WHOLE, "a whole number"),
    "workers": (WORKERS, f"a whole number from 1 to {MOST_WORKERS}"),
    "has_standby": (bool, "true or false"),
    "memory": (str, "text"),
    "parameters": (WHOLE, "a whole number"),
    "plan": (list[dict[str, Any]], "a list of phases"),
    "rules": (dict[str, Any], "a mapping"),
    "threads": (WHOLE, "a whole number"),
    "identity": (dict[str, Any], "a mapping"),
    "stops_before": (list[Any], "a list"),
    "versions": (dict[str, Any], "a mapping"),
}


class Configuration(dict[str, Any]):
    """Content of `run.json` with checked types; reading a missing entry raises a `UsageError`."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        super().__init__(content)
        self._source = source

    def __missing__(self, key: str) -> Any:
        raise UsageError(f"{self._source} has no {key!r}; expected what a run has written")


def configuration(content: object, source: str) -> Configuration:
    """Return the content of a `run.json`.

    Args:
        content: value that JSON gives.
        source: name of the file, for the error about a missing entry.

    Raises:
        ContentError: the content is no mapping, or an entry has a wrong type.
    """
    if not isinstance(content, dict):
        raise ContentError(f"it holds a {type(content).__name__}, expected a mapping")
    _check_entries(content)
    for name, text in content.items():
        if isinstance(text, str) and printable(text) != text:
            raise ContentError(f"{name} is {ascii(text)[:SHOWN]}, expected text without control characters")
    try:
        content = upgrade(content)
    except ContentError:
        raise
    except _OF_CONTENT as error:
        raise ContentError(f"its plan is not what a run writes ({type(error).__name__}: {error})") from error
    if "rules" in content:
        Rules.check(content["rules"])
        content = {**content, "rules": Configuration(content["rules"], f"{source}, rules,")}
    return Configuration(content, source)


def _check_entries(content: Mapping[str, Any]) -> None:
    for name, (kind, wanted) in CONFIGURATION.items():
        if name in content and not has_type(content[name], kind):
            raise ContentError(f"{name} is {repr(content[name])[:SHOWN]}, expected {wanted}")


@contextmanager
def believed(source: object, kind: type[PacelineError] = UsageError) -> Iterator[None]:
    """Convert errors that content which no run has written causes in the parts of a run.

    Args:
        source: name of the file or folder.
        kind: class of the error to raise.

    Raises:
        PacelineError: a part has raised an error; the message has it in one line.
    """
    try:
        yield
    except PacelineError:
        raise
    except (*_OF_CONTENT, RuntimeError) as error:
        raise kind(f"{source} holds what no run writes ({in_short(error)}); it was damaged or changed") from error


def in_short(error: Exception) -> str:
    """Return the class and the beginning of the message of an error, whose text may be that of a file."""
    text = printable(in_one_line(str(error), SHOWN))
    return f"{type(error).__name__}{f': {text}' if text else ''}"


_OF_CONTENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
