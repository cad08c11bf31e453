"""Result of one check of a machine."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """Verdict of a check."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of one check.

    Args:
        subject: what was checked, as in "open files".
        status: verdict.
        finding: what was found, with numbers.
        advice: what to type or to change; empty if there is nothing to do.
    """

    subject: str
    status: Status
    finding: str
    advice: str = ""
