"""Lets ranks take part in a run without a server, and passes on what they say."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from paceline.engines.distributed.door import Door, Entered
from paceline.engines.distributed.line import Broken, Line


class Member(NamedTuple):
    """A process that takes part, or is about to."""

    ticket: int
    line: Line
    name: str
    has_own_gpu: bool


class Host(Protocol):
    """Who is told of them, in a thread for each."""

    def enter(self, worker: int, member: Member) -> None:
        """Let a process take part."""

    def hear(self, worker: int, ticket: int, text: dict[str, Any]) -> None:
        """Take in what a worker says."""

    def leave(self, worker: int, ticket: int, reason: str) -> None:
        """Note that a process is gone."""

    def fail(self, error: Exception) -> None:
        """Let the run end with this."""


class Gate(Door):
    """A door behind which everybody is listened to by the same host.

    Args:
        host: is told.
        place: of the door, as in `Door`.
    """

    def __init__(self, host: Host, *place: Any) -> None:
        self._host = host
        super().__init__(*place)

    def _report(self, entered: Entered) -> None:
        """Report nothing yet: the host gets the report when the process has sent its name."""

    def _listen(self, entered: Entered) -> None:
        ticket, worker, line, _ = entered
        try:
            if not self._welcome(entered):
                return
            hello = line.receive()
            assert isinstance(hello, dict)
            self._host.enter(worker, Member(ticket, line, str(hello["name"]), bool(hello["has_own_gpu"])))
            while True:
                text = line.receive()
                assert isinstance(text, dict)
                self._host.hear(worker, ticket, text)
        except Broken as error:
            self._host.leave(worker, ticket, str(error))
        except Exception as error:  # nobody would hear this worker any more, and the run wait for it for ever
            self._host.fail(error)
