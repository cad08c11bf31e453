"""Errors of user code: notes on where they arose, and tracebacks below that place."""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import TracebackException, walk_tb
from typing import Any

from paceline.errors import PacelineError, UsageError

HEAD = "paceline: "


class RemoteTracebackError(Exception):
    """Traceback of an exception in another process, as the cause of the RunError that it leads to."""


def note_place(error: BaseException, place: str) -> None:
    """Add a note to an exception of user code on where it arose; a second place is appended to the first.

    The exception itself is unchanged. Python prints the note below the message, `report_of` above the traceback.

    >>> error = ValueError("no such class")
    >>> note_place(error, "the loss of job gpt failed for worker 2, draw 5")
    >>> note_place(error, "update 17")
    >>> error.__notes__
    ['paceline: the loss of job gpt failed for worker 2, draw 5, update 17']
    """
    if isinstance(error, PacelineError):
        return  # the message has the place
    notes: list[str] = getattr(error, "__notes__", [])
    if notes and notes[-1].startswith(HEAD):
        notes[-1] += f", {place}"
    else:
        error.add_note(f"{HEAD}{place}")


@contextmanager
def at_place(place: str) -> Iterator[None]:
    """Note this place on an exception that is raised in the context."""
    try:
        yield
    except Exception as error:
        note_place(error, place)
        raise


def place_of(error: BaseException) -> str:
    """Return the place where an exception of user code arose; empty without a note."""
    ours = [note for note in getattr(error, "__notes__", []) if note.startswith(HEAD)]
    return ours[-1].removeprefix(HEAD) if ours else ""


def is_raised_here(error: BaseException) -> bool:
    """Return whether code of paceline itself has raised an exception, below what it was called by."""
    frames = list(walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("paceline.")


def report_of(error: BaseException) -> str:
    """Return the traceback of an exception, after the place where it arose."""
    place = place_of(error)
    report = TracebackException.from_exception(error)
    report.__notes__ = [note for note in report.__notes__ or [] if note != f"{HEAD}{place}"]
    traceback = "".join(report.format())
    return f"{place}:\n{traceback}" if place else traceback


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return what another process is sent of an exception: message, report, and whether the user has to act.

    >>> failure_of(ValueError("no such class"))["failed"]
    'ValueError: no such class'
    """
    is_usage = isinstance(error, UsageError)
    message = str(error) if is_usage else f"{type(error).__name__}: {error}"
    return {"failed": message, "details": report_of(error), "is_usage": is_usage}
