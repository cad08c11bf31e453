"""What paceline says when it cannot go on: one line with what was given, what was expected, what to type."""

from collections.abc import Iterable
from difflib import get_close_matches


class PacelineError(Exception):
    """Base of every error that paceline raises on purpose; its text is one clear line."""


class UsageError(PacelineError, ValueError):
    """Something given by the user cannot work; nothing has run. The command line exits with 2."""


class RunError(PacelineError, RuntimeError):
    """A run could not go on; what it had learned is kept. The command line exits with 1."""


class PacelineWarning(UserWarning):
    """Something that the user should know and that does not stop anything."""


def describe_error(error: BaseException) -> str:
    """Return what an error says, or its name if it says nothing.

    >>> describe_error(KeyboardInterrupt())
    'KeyboardInterrupt'
    """
    return str(error) or type(error).__name__


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, else the list of known names.

    >>> did_you_mean("k_sink", ["bsp", "k_sync"])
    "; did you mean 'k_sync'?"
    >>> did_you_mean("zzz", ["bsp", "asp"])
    '; known: asp, bsp'
    """
    names = sorted(known)
    near = get_close_matches(given, names, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(names)}"
