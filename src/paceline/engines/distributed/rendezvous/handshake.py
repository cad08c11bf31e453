"""Mutual authentication by a shared token, and the check that all processes run the same job."""

from __future__ import annotations

import hmac
import secrets
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from paceline.clusters.launch_env import TO_JOIN
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import Connection
from paceline.errors import RunError, UsageError
from paceline.utils.dict_diff import changes

WRONG_TOKEN = "wrong token (set PACELINE_TOKEN to the same value on every host)"
WORLD_SIZE = "WORLD_SIZE"  # key of a job_spec
SAME_FOR_ALL = "give every rank the same command and code"
MAX_DIFFERENCES = 10  # in a message
M = TypeVar("M")


class JoinRejected(Exception):  # noqa: N818  # no error of this run
    """A process may not take part.

    Attributes:
        has_token: whether the process belongs to this job, so that the job must be configured differently.
    """

    def __init__(self, reason: str, has_token: bool) -> None:
        super().__init__(reason)
        self.has_token = has_token


class RunFinished(Exception):  # noqa: N818  # every run finishes
    """Rank 0 has ended the run.

    Attributes:
        end: outcome and reason.
    """

    def __init__(self, end: messages.End) -> None:
        super().__init__(end.reason)
        self.end = end


class SignedEnd(msgspec.Struct, frozen=True):
    """End of a run, as published in the store, where every process on the network can write."""

    end: str
    digest: str


def authenticate_peer(connection: Connection, token: str, job_spec: dict[str, Any], workers: int) -> messages.Hello:
    """Check that a peer has the token and the same job; return its introduction.

    The peer then waits for `Accepted` or `End`. Before it has proved that it has the token it may send only short
    messages, and this process sends it nothing about the job.

    Args:
        connection: connection to the peer.
        token: token of the job.
        job_spec: settings that must be equal on all processes.
        workers: numbers that a peer can have, from 0.

    Raises:
        JoinRejected: the peer may not take part.
        ValueError: the peer sends another message than expected.
    """
    nonce = secrets.token_hex(32)
    connection.send(messages.Challenge(nonce))
    proof = connection.recv()
    if not isinstance(proof, messages.Proof) or not _is_signed(proof.digest, token, "worker", nonce):
        connection.send(messages.Rejected(WRONG_TOKEN))
        raise JoinRejected(WRONG_TOKEN, has_token=False)
    connection.lift_size_limit()
    connection.send(messages.Proof(_digest(token, "server", proof.nonce)))
    hello = connection.recv()
    if not isinstance(hello, messages.Hello):
        raise ValueError(f"expected Hello, received {type(hello).__name__}")
    reason = _difference(hello, job_spec, workers)
    if reason:
        connection.send(messages.Rejected(reason))
        raise JoinRejected(reason, has_token=True)
    return hello


def _difference(hello: messages.Hello, job_spec: dict[str, Any], workers: int) -> str:
    """Return why a process of this job may not take part, empty if it may."""
    found = _changes(job_spec, hello.job_spec)
    if found:
        more = f" and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
        advice = TO_JOIN if job_spec.get(WORLD_SIZE) != hello.job_spec.get(WORLD_SIZE) else SAME_FOR_ALL
        return f"{hello.name} differs from rank 0: {'; '.join(found[:MAX_DIFFERENCES])}{more}: {advice}"
    if hello.worker not in range(workers):
        return f"{hello.name}: there is no worker {hello.worker}, only 0 to {workers - 1}; {TO_JOIN}"
    return ""


def authenticate_self(connection: Connection, token: str, hello: messages.Hello) -> None:
    """Prove to a server that this process has the token, check that the server has it, and join.

    Args:
        connection: connection to the server.
        token: token of the job.
        hello: introduction of this process, sent after both proofs.

    Raises:
        UsageError: the server rejects this process.
        RunError: the server does not have the token.
        RunFinished: the run has ended.
    """
    challenge = _expect(messages.Challenge, connection.recv())
    nonce = secrets.token_hex(32)
    connection.send(messages.Proof(_digest(token, "worker", challenge.nonce), nonce))
    answer = connection.recv()
    if isinstance(answer, messages.Rejected):
        raise UsageError("rank 0 has another token; set PACELINE_TOKEN to the same value on every host")
    if not _is_signed(_expect(messages.Proof, answer).digest, token, "server", nonce):
        raise RunError("the process at the address of rank 0 does not have the token of this job")
    connection.lift_size_limit()
    connection.send(hello)
    match connection.recv():
        case messages.Rejected(reason):
            raise UsageError(reason)
        case messages.End() as end:
            raise RunFinished(end)
        case answer:
            _expect(messages.Accepted, answer)


def sign_end(end: messages.End, token: str) -> str:
    """Return the end of a run as text, with a proof that its sender has the token."""
    text = msgspec.json.encode(end).decode()
    return msgspec.json.encode(SignedEnd(text, _digest(token, "end", text))).decode()


def check_signed_end(text: str, token: str) -> None:
    """Read a text that may be the end of the run.

    Raises:
        RunFinished: the text is one, by a process that has the token.
    """
    with suppress(msgspec.DecodeError):
        signed = msgspec.json.decode(text, type=SignedEnd)
        if _is_signed(signed.digest, token, "end", signed.end):
            raise RunFinished(msgspec.json.decode(signed.end, type=messages.End))


def _changes(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the differences; for plans with different names, only the names."""
    plain = [{name: value for name, value in each.items() if name != "plan"} for each in (ours, theirs)]
    return changes(*plain) or changes(ours, theirs)


def _expect(kind: type[M], message: object) -> M:
    if not isinstance(message, kind):
        raise RunError("the process at the address of rank 0 is no server of paceline")
    return message


def _digest(token: str, role: str, nonce: str) -> str:
    return hmac.digest(token.encode(), f"{role} {nonce}".encode(), "sha256").hex()


def _is_signed(digest: str, token: str, role: str, nonce: str) -> bool:
    return hmac.compare_digest(digest.encode(), _digest(token, role, nonce).encode())
