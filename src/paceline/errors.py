"""Errors and warnings of paceline: one line with what was given, what was expected, and what to type."""

from collections.abc import Iterable
from difflib import get_close_matches

# Arguments by the words of other libraries and of the papers, for names that differ too much from ours.
_OTHER_WORDS = {
    "accuracy": "stop",
    "elastic": "min_workers",
    "epochs": "stop",
    "gradients": "stop",
    "loss": "stop",
    "max_lead": "lead",
    "num_workers": "n",
    "period": "H",
    "seconds": "stop",
    "silence": "heartbeat_timeout_s",
    "silence_s": "heartbeat_timeout_s",
    "slices": "shards",
    "staleness": "lead",
    "target": "stop",
    "updates": "stop",
    "world_size": "n",
}


class PacelineError(Exception):
    """Base class of the errors of paceline; the message is one line."""


class UsageError(PacelineError, ValueError):
    """Invalid argument or option; nothing has run. The command line exits with status 2."""


class RunError(PacelineError, RuntimeError):
    """Failure during a run; the model and the records so far are kept. The command line exits with status 1."""


class PacelineWarning(UserWarning):
    """Warning for the user; the run continues."""


def describe_error(error: BaseException) -> str:
    """Return the message of an error, or the name of its class if the message is empty.

    >>> describe_error(KeyboardInterrupt())
    'KeyboardInterrupt'
    """
    return str(error) or type(error).__name__


def describe_read_error(error: Exception) -> str:
    """Return why a file could not be read, without the number of the error and the name of the file.

    >>> describe_read_error(FileNotFoundError(2, "No such file or directory", "run.csv"))
    'No such file or directory'
    """
    return getattr(error, "strerror", None) or describe_error(error)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, else the list of known names.

    >>> did_you_mean("k_sink", ["bsp", "k_sync"])
    "; did you mean 'k_sync'?"
    >>> did_you_mean("zzz", ["bsp", "asp"])
    '; known: asp, bsp'
    """
    names = sorted(known)
    by_lower_case = {name.lower(): name for name in names}
    near = [by_lower_case[name] for name in get_close_matches(given.lower(), by_lower_case, n=1)]
    if _OTHER_WORDS.get(given) in names:
        near = [_OTHER_WORDS[given]]
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(names)}"
