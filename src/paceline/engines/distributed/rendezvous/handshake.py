"""Who may take part: whoever knows the token and wants to do the same as rank 0."""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

from paceline.clusters.launch_env import TO_JOIN
from paceline.engines.distributed.transport.connection import Connection
from paceline.errors import RunError, UsageError
from paceline.utils.dict_diff import changes

WRONG_TOKEN = "it does not know the token of this job"
WORLD_SIZE = "WORLD_SIZE"  # in an agreement
SAME_FOR_ALL = "give every rank the same command and code"
SHOWN = 10  # differences that are told one by one


class JoinRejected(Exception):  # noqa: N818  # what a stranger is told is no error of this run
    """Somebody may not take part.

    Attributes:
        is_ours: it knows the token, so that the whole job is to hear of it.
    """

    def __init__(self, reason: str, is_ours: bool) -> None:
        super().__init__(reason)
        self.is_ours = is_ours


class RunOver(Exception):  # noqa: N818  # no error: there is nothing left to do
    """The run ended before this process took part.

    Attributes:
        end: what rank 0 says of it.
    """

    def __init__(self, end: dict[str, Any]) -> None:
        super().__init__(str(end.get("error", end.get("reason"))))
        self.end = end


def examine(line: Connection, token: str, agreement: dict[str, Any], processes: int) -> dict[str, Any]:
    """Return what a newcomer says of itself, when it has proved that it knows the token and agrees with this process.

    The newcomer then waits for its admission, or for the end of the run.

    Until it has, it may say no more than a few bytes; and it hears the same proof before it says more.

    Args:
        line: to it; its next text is expected to be the answer.
        token: of the job.
        agreement: what all processes have to agree on.
        processes: how many numbers there are.

    Raises:
        Refused: it may not take part.
        ValueError: it does not say who it is.
    """
    challenge = secrets.token_hex(32)
    line.tell({"challenge": challenge})
    claim = line.receive()
    if not isinstance(claim, dict) or not _is_proved(claim.get("proof"), token, "worker", challenge):
        line.tell({"refused": WRONG_TOKEN})
        raise JoinRejected(WRONG_TOKEN, is_ours=False)
    line.trust()
    line.tell({"proof": _proof(token, "server", str(claim.get("challenge")))})
    hello = line.receive()
    if not isinstance(hello, dict):
        raise ValueError("it does not say who it is")
    reason = _what_is_wrong(hello, agreement, processes)
    if reason:
        line.tell({"refused": reason})
        raise JoinRejected(reason, is_ours=True)
    return hello


def _what_is_wrong(hello: dict[str, Any], agreement: dict[str, Any], processes: int) -> str:
    """Return why a process of this job may not take part, empty if it may."""
    found = _disagreements(agreement, hello["agreement"])
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        advice = TO_JOIN if agreement.get(WORLD_SIZE) != hello["agreement"].get(WORLD_SIZE) else ""
        differing = f"{hello['name']} differs from rank 0: {'; '.join(found[:SHOWN])}{more}"
        return f"{differing}: {advice or SAME_FOR_ALL}"
    if hello["worker"] not in range(processes):
        return f"{hello['name']}: there is no worker {hello['worker']}, only 0 to {processes - 1}; {TO_JOIN}"
    return ""


def apply_for(line: Connection, token: str, hello: dict[str, Any]) -> None:
    """Prove to rank 0 that this process knows the token, see it prove the same, and hear whether one may take part.

    Args:
        line: to rank 0.
        token: of the job.
        hello: what it is told then: name, worker, agreement.

    Raises:
        UsageError: one may not take part.
        RunError: whoever answers there does not know the token either.
        RunOver: the run has ended.
    """
    asked = _receive(line)
    challenge = secrets.token_hex(32)
    line.tell({"proof": _proof(token, "worker", str(asked.get("challenge"))), "challenge": challenge})
    answer = _receive(line)
    if answer.get("refused") == WRONG_TOKEN:
        raise UsageError("rank 0 has another token; set PACELINE_TOKEN to the same on every host")
    if not _is_proved(answer.get("proof"), token, "server", challenge):
        raise RunError("what answers in the place of rank 0 does not know the token of this job")
    line.trust()
    line.tell(hello)
    answer = _receive(line)
    if "refused" in answer:
        raise UsageError(str(answer["refused"]))
    if "end" in answer:
        raise RunOver(answer["end"])


def notice_of_end(end: dict[str, Any], token: str) -> str:
    """Return the end of a run as text, with a proof that its sender knows the token."""
    text = json.dumps(end)
    return json.dumps({"end": text, "proof": _proof(token, "end", text)})


def check_notice(notice: str, token: str) -> None:
    """Read a text that may be a notice of the end.

    Raises:
        RunOver: it is one, by a process that knows the token.
    """
    try:
        told = json.loads(notice)
        text, proof = told["end"], told["proof"]
    except (ValueError, KeyError, TypeError):
        return
    if isinstance(text, str) and _is_proved(proof, token, "end", text):
        raise RunOver(json.loads(text))


def _disagreements(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return in words what is not the same; of plans that have other names, not their insides too."""
    plain = [{name: value for name, value in each.items() if name != "plan"} for each in (ours, theirs)]
    return changes(*plain) or changes(ours, theirs)


def _receive(line: Connection) -> dict[str, Any]:
    text = line.receive()
    if not isinstance(text, dict):
        raise RunError("what answers in the place of rank 0 is no server of paceline")
    return text


def _proof(token: str, who: str, challenge: str) -> str:
    return hmac.digest(token.encode(), f"{who} {challenge}".encode(), "sha256").hex()


def _is_proved(given: object, token: str, who: str, challenge: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given, _proof(token, who, challenge))
