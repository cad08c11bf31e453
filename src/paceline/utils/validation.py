"""Range checks of arguments, by an interval that is both the test and the message."""

from functools import cache
from math import nan
from numbers import Integral, Real
from typing import TypeGuard

from paceline.errors import UsageError


def check_range(interval: str, kind: type = Real, /, **values: object) -> None:
    """Raise a UsageError unless every value is a number of a kind (``Real`` or ``Integral``) inside an interval.

    >>> check_range("(0, inf)", mean_s=1.5)
    >>> check_range("[1, inf)", Integral, n=0)
    Traceback (most recent call last):
    paceline.errors.UsageError: n=0 is not a whole number in [1, inf)
    """
    for name, value in values.items():
        if not _is_number(value, kind) or not _inside(_as_float(value), interval):
            noun = "a whole number" if kind is Integral else "a number"
            raise UsageError(f"{name}={value!r} is not {noun} in {interval}")


def check_optional_range(interval: str, kind: type = Real, /, **values: object) -> None:
    """Check as `check_range` does, but accept None."""
    check_range(interval, kind, **{name: value for name, value in values.items() if value is not None})


def _is_number(value: object, kind: type) -> TypeGuard[Real]:
    if type(value) is int or (type(value) is float and kind is Real):
        return True  # most values, for which the test of an abstract class would take ten times as long
    return isinstance(value, Real) and isinstance(value, kind) and not isinstance(value, bool)


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond the range of floats
        return nan


def _inside(value: float, interval: str) -> bool:
    low, high = _ends(interval)
    return low < value < high or (interval[0] == "[" and value == low) or (interval[-1] == "]" and value == high)


@cache
def _ends(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].split(",")
    return float(low), float(high)
