"""Outcome of a run that an error in the code of the user has ended."""

from __future__ import annotations

from paceline.core.events import Outcome
from paceline.utils.wording import first_line

LONGEST_REASON = 300  # characters


def why_left(error: BaseException) -> tuple[Outcome, str]:
    """Return the outcome of a run that ends with an error in a loop, and the error in one line.

    >>> why_left(ValueError("no such class"))
    (<Outcome.FAILED: 'failed'>, 'ValueError: no such class')
    >>> why_left(KeyboardInterrupt())
    (<Outcome.INTERRUPTED: 'interrupted'>, 'KeyboardInterrupt')
    """
    name = type(error).__name__
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return Outcome.INTERRUPTED, name
    return Outcome.FAILED, (f"{name}: {first_line(str(error))}" if str(error) else name)[:LONGEST_REASON]
