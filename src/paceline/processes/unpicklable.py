"""Pickling of an object for child processes, with an error message that names the part that cannot be pickled."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from paceline.errors import UsageError, describe_error
from paceline.processes.shared_pickle import ArrayPickler, SharedPickle
from paceline.utils.wording import in_one_line

MAX_DEPTH = 8  # parts of parts
MAX_MEMBERS = 100  # of one object
ADVICE = "create open files, locks, generators and connections inside the function or method that uses them"


class _Discard:
    """File that discards its input."""

    def write(self, text: bytes) -> int:
        return len(text)


def pickled(content: object, parts: Mapping[str, object], refused: str, otherwise: str = "") -> SharedPickle:
    """Return the pickle of an object for child processes.

    Args:
        content: object to pickle.
        parts: parts of the object, by the names that the user gave them.
        refused: beginning of the error message.
        otherwise: end of the error message, with another remedy.

    Raises:
        UsageError: the object cannot be pickled; the message names the part and the cause.
    """
    with explained(parts, refused, otherwise):
        return SharedPickle(content)


@contextmanager
def explained(parts: Mapping[str, object], refused: str, otherwise: str = "") -> Iterator[None]:
    """Explain why an object cannot be pickled in this context; the arguments are those of `pickled`."""
    try:
        yield
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise UsageError(f"{refused}: {explain_unpicklable(parts)}; {ADVICE}{otherwise}") from error


def explain_unpicklable(parts: Mapping[str, object]) -> str:
    """Return the part that cannot be pickled, the path to the object that causes it, and the error.

    >>> explain_unpicklable({"model": int, "loss": partial(print, file=(_ for _ in ()))})
    "loss: its argument file is a generator (cannot pickle 'generator' object)"
    """
    for name, part in parts.items():
        found = _cause(part, "", MAX_DEPTH, set())
        if found is not None:
            where, cause, error = found
            within = f"its {where} is" if where else "it is"
            return f"{name}: {within} a {type(cause).__name__} ({in_one_line(describe_error(error))})"
    return "it cannot be pickled"


def _cause(part: object, where: str, depth: int, seen: set[int]) -> tuple[str, object, Exception] | None:
    """Return the path to the innermost part that cannot be pickled, that part, and its error; None if there is none."""
    if id(part) in seen:
        return None
    seen.add(id(part))
    error = _pickle_error(part)
    if error is None:
        return None
    if depth:
        for name, inner in islice(_members(part), MAX_MEMBERS):
            found = _cause(inner, f"{where}, its {name}" if where else name, depth - 1, seen)
            if found is not None:
                return found
    return where, part, error


def _pickle_error(part: object) -> Exception | None:
    try:
        ArrayPickler(_Discard()).dump(part)
    except Exception as error:  # an object's own __reduce__ may raise anything
        return error
    return None


def _members(part: object) -> Iterator[tuple[str, object]]:
    match part:
        case partial():
            yield "function", part.func
            yield from ((f"argument {number}", each) for number, each in enumerate(part.args, 1))
            yield from ((f"argument {name}", each) for name, each in part.keywords.items())
        case FunctionType():
            used = inspect.getclosurevars(part)
            yield from ((f"variable {name}", each) for name, each in {**used.nonlocals, **used.globals}.items())
            yield from ((f"default {number}", each) for number, each in enumerate(part.__defaults__ or (), 1))
        case MethodType():
            yield "object", part.__self__
        case dict():
            yield from ((f"item {name!r}", each) for name, each in part.items())
        case list() | tuple():
            yield from ((f"item {number}", each) for number, each in enumerate(part))
        case type():
            yield from ((f"attribute {name}", each) for name, each in vars(part).items())
        case ModuleType() | BuiltinFunctionType():
            return
        case _:
            yield f"class {type(part).__name__}", type(part)
            yield from ((f"attribute {name}", each) for name, each in getattr(part, "__dict__", {}).items())
