"""Validation of a run's files: types in `run.json`, and types and order of the records in the log.

Only types, ranges and the order of records are checked. A check raises a `ContentError` without the name of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import inf, isfinite, isnan
from typing import Any, get_args

from paceline.core.records import Record, RunResumed, RunStarted, UpdateMade
from paceline.errors import PacelineError, UsageError
from paceline.recording.schema import upgrade
from paceline.utils.files import ContentError
from paceline.utils.wording import in_one_line

MOST_WORKERS = 100_000
LARGEST = 1 << 53  # whole numbers that a float holds exactly
SHOWN = 60

Check = Callable[[object], bool]


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number from 0 to 2^53."""
    return type(value) is int and 0 <= value <= LARGEST


def is_number(value: object) -> bool:
    """Return whether a value is a number, nan included, that is not too large for a float."""
    return type(value) is float or (type(value) is int and -LARGEST <= value <= LARGEST)


def is_text(value: object) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def _is_numbers_by_name(value: object) -> bool:
    return isinstance(value, Mapping) and all(is_text(name) and is_number(each) for name, each in value.items())


def _is_pairs(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and is_text(pair[0]) and is_number(pair[1]) for pair in value
    )


_BY_ANNOTATION: Mapping[str, Check] = {
    "float": is_number,
    "int": is_whole,
    "bool": lambda value: isinstance(value, bool),
    "str": is_text,
    "int | None": lambda value: value is None or is_whole(value),
    "Mapping[str, float]": _is_numbers_by_name,
    "Sequence[tuple[str, float]]": _is_pairs,
}


def _checks(kind: type[Any]) -> list[tuple[str, Check]]:
    annotated = [(field.name, _BY_ANNOTATION.get(str(field.type))) for field in fields(kind)]
    return [(name, check) for name, check in annotated if check is not None]


_CHECKS: Mapping[type[Any], list[tuple[str, Check]]] = {kind: _checks(kind) for kind in get_args(Record)}


def check_types(record: Record) -> None:
    """Check that every field of a record has its annotated type.

    Raises:
        ContentError: a field has another type.
    """
    for name, check in _CHECKS[type(record)]:
        if not check(getattr(record, name)):
            raise ContentError(f"{name} = {repr(getattr(record, name))[:SHOWN]}")


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


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_workers(value: object) -> bool:
    return is_whole(value) and 1 <= value <= MOST_WORKERS  # type: ignore[operator]


def _is_plan(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_mapping, value))


def _is_optional_number(value: object) -> bool:
    return value is None or (is_number(value) and not isnan(value))  # type: ignore[arg-type]


def _is_extent(value: object) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == {"unit", "amount"}
        and is_text(value["unit"])
        and is_number(value["amount"])
        and isfinite(value["amount"])
    )


CONFIGURATION: Mapping[str, tuple[Check, str]] = {
    "schema": (is_whole, "a whole number"),
    "job": (is_text, "text"),
    "protocol": (is_text, "text"),
    "cluster": (is_text, "text"),
    "stop": (is_text, "text"),
    "seed": (lambda value: type(value) is int, "a whole number"),
    "batch_size": (is_whole, "a whole number"),
    "workers": (_is_workers, f"a whole number from 1 to {MOST_WORKERS}"),
    "memory": (is_text, "text"),
    "parameters": (is_whole, "a whole number"),
    "plan": (_is_plan, "a list of phases"),
    "rules": (_is_mapping, "a mapping"),
    "threads": (is_whole, "a whole number"),
    "identity": (_is_mapping, "a mapping"),
    "stops_before": (lambda value: isinstance(value, list), "a list"),
    "versions": (_is_mapping, "a mapping"),
}
RULES: Mapping[str, tuple[Check, str]] = {
    "workers": (_is_workers, f"a whole number from 1 to {MOST_WORKERS}"),
    "per_epoch": (lambda value: value is None or is_whole(value), "a whole number"),
    "minibatches": (lambda value: value is None or _is_mapping(value), "a mapping"),
    "learning_rate": (_is_mapping, "a mapping"),
    "schedule": (lambda value: value is None or _is_mapping(value), "a mapping"),
    "worker_timeout_s": (_is_optional_number, "seconds"),
    "evaluate_every": (_is_extent, "a unit and an amount"),
    "measure_steps": (lambda value: isinstance(value, bool), "true or false"),
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
    _check_entries(content, CONFIGURATION, "")
    try:
        content = upgrade(content)
    except _OF_CONTENT as error:
        raise ContentError(f"its plan is not what a run writes ({type(error).__name__}: {error})") from error
    if "rules" in content:
        _check_entries(content["rules"], RULES, "rules ")
        content = {**content, "rules": Configuration(content["rules"], f"{source}, rules,")}
    return Configuration(content, source)


def _check_entries(content: Mapping[str, Any], known: Mapping[str, tuple[Check, str]], where: str) -> None:
    for name, (check, wanted) in known.items():
        if name in content and not check(content[name]):
            raise ContentError(f"{where}{name} is {repr(content[name])[:SHOWN]}, expected {wanted}")


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
        text = in_one_line(str(error), SHOWN)
        what = f"{type(error).__name__}{f': {text}' if text else ''}"
        raise kind(f"{source} holds what no run writes ({what}); it was damaged or changed") from error


_OF_CONTENT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)
