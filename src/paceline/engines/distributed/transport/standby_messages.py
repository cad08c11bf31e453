"""Messages between rank 0 and its standby."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from paceline.core import events
from paceline.core.bounds import Port, Whole
from paceline.engines.distributed.transport.encoded import decoded, encoded
from paceline.engines.distributed.transport.task_messages import MessageStruct


class FollowedEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Event that rank 0 has handled: one of these fields.

    Example:
        >>> FollowedEvent.of(events.Timer(2.0)).event
        Timer(now=2.0)
    """

    arrival: events.Arrival | None = None
    applied: events.UpdateApplied | None = None
    timer: events.Timer | None = None
    joined: events.Joined | None = None
    lost: events.Lost | None = None
    shares_memory: events.SharesMemory | None = None
    evaluated: events.Evaluated | None = None
    aborted: events.AbortRun | None = None
    restarted: events.Restarted | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in msgspec.structs.astuple(self)) != 1:
            raise ValueError("no event, or several")

    @classmethod
    def of(cls, event: events.Event) -> FollowedEvent:
        """Return the message about an event."""
        fields: dict[str, Any] = {_FIELDS[type(event)]: event}
        return cls(**fields)

    @property
    def event(self) -> events.Event:
        """Event of this message."""
        event: events.Event = next(each for each in msgspec.structs.astuple(self) if each is not None)
        return event


_FIELDS: dict[type[Any], str] = {
    events.Arrival: "arrival",
    events.UpdateApplied: "applied",
    events.Timer: "timer",
    events.Joined: "joined",
    events.Lost: "lost",
    events.SharesMemory: "shares_memory",
    events.Evaluated: "evaluated",
    events.AbortRun: "aborted",
    events.Restarted: "restarted",
}


LENGTH_BYTES = 4  # before each event


def joined_events(followed: Iterable[FollowedEvent]) -> bytes:
    """Return events as they are sent, each after the number of its bytes."""
    contents = [encoded(each) for each in followed]
    return b"".join(len(content).to_bytes(LENGTH_BYTES, "big") + content for content in contents)


def split_events(content: bytes) -> Iterator[events.Event]:
    """Yield the events of such bytes, of which only one is decoded at a time.

    Raises:
        ValueError: they are none.

    >>> list(split_events(joined_events([FollowedEvent.of(events.Timer(2.0))])))
    [Timer(now=2.0)]
    """
    start = 0
    while start < len(content):
        begin = start + LENGTH_BYTES
        start = begin + int.from_bytes(content[start:begin], "big")
        followed: FollowedEvent = decoded(content[begin:start], FollowedEvent, "events")
        yield followed.event


class StandbyListens(MessageStruct, frozen=True):
    """The standby listens on this port of its host."""

    port: Port


class StandbyAddress(MessageStruct, frozen=True):
    """Workers that lose rank 0 join the standby, at this address."""

    host: str
    port: Port


class StandbyLost(MessageStruct, frozen=True):
    """Rank 0 goes on without its standby, which the receiver must not join any more."""


class StandbyForgotten(MessageStruct, frozen=True):
    """Answer to `StandbyLost`: the sender will not join the standby."""


class NotServing(MessageStruct, frozen=True):
    """The standby admits no worker while it follows rank 0."""


class UpdateReceived(MessageStruct, frozen=True):
    """The standby has all that it needs for this version."""

    version: Whole


StandbyMessage = StandbyListens | StandbyAddress | StandbyLost | StandbyForgotten | NotServing | UpdateReceived
