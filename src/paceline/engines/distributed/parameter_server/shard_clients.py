"""The servers of the other slices, as rank 0 knows them: it tells them what it does, and they do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.checkpoint.codec import decode, encode
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import Apply, Arrival
from paceline.core.sharding import ShardPeers
from paceline.engines.distributed.rendezvous.acceptor import News, PeerLost, PeerMessage
from paceline.engines.distributed.transport.connection import TENSORS, Connection
from paceline.engines.distributed.transport.event_queue import EventQueue
from paceline.engines.distributed.transport.messages import ApplyUpdate, Command, Sums, Updated, sums_of
from paceline.errors import RunError, UsageError

Answer = Any


class ShardClients(ShardPeers):
    """Slices 1 to m - 1, each with a server of its own that is told everything in the order in which rank 0 does it.

    They may be behind rank 0, but by no more than one update.

    Args:
        ranks: beside which they are, with rank 0 for the first.

    Attributes:
        numbers: of the slices.
        inbox: where their answers come.
    """

    inbox: EventQueue[News]

    def __init__(self, ranks: Sequence[int]) -> None:
        self.numbers = range(1, len(ranks))
        self._ranks = ranks
        self._lines: dict[int, Connection] = {}  # by slice
        self._numbers: dict[int, int] = {}  # slice, by ticket
        self._busy: set[int] = set()  # those that have not yet made the update that was made here last
        self._loaded: Mapping[str, Any] | None = None

    @property
    def missing(self) -> list[int]:
        """Whose server has not come."""
        return [number for number in self.numbers if number not in self._lines]

    def number_of(self, ticket: int) -> int | None:
        """Return the slice whose server holds this ticket, if one does."""
        return self._numbers.get(ticket)

    def enter(self, number: int, ticket: int, line: Connection) -> None:
        """Let a server take part; one that is there already stays, and the other one is told to go."""
        if number in self._lines:
            line.tell({"end": {"reason": f"slice {number} has a server"}})
            return
        line.tell({"owns": number})
        self._lines[number] = line
        self._numbers[ticket] = number

    @property
    def tickets(self) -> list[int]:
        """By which their servers are known."""
        return list(self._numbers)

    @property
    def lines(self) -> dict[int, Connection]:
        """To their servers, by ticket."""
        return {ticket: self._lines[number] for ticket, number in self._numbers.items()}

    # --- what they are told ------------------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Let everybody begin with this version, and with what was loaded."""
        tensors: dict[str, Any] = {}
        state = encode(dict(self._loaded), tensors) if self._loaded is not None else None
        self._loaded = None
        self.tell({"begin": version, "state": state}, tensors)

    def send(self, command: Command) -> None:
        """Tell everybody to do something."""
        for line in self._lines.values():
            line.send(command)

    def tell(self, text: dict[str, Any], tensors: dict[str, Any] | None = None) -> None:
        """Tell everybody something."""
        for line in self._lines.values():
            line.tell(text, tensors)

    def apply(self, update: Apply, elsewhere: bool) -> None:
        """Let everybody make an update, when they have made the one before.

        Args:
            update: to make.
            elsewhere: whether the version before is still read.
        """
        for number in list(self._busy):
            self.hear(number, self._await(number, lambda said: isinstance(said, Updated)))
        command = ApplyUpdate.of(update, elsewhere)
        for number, line in self._lines.items():
            line.send(command, will_be_answered=True)
            self._busy.add(number)

    def compensate(self, arrival: Arrival, coordinator: Coordinator, version: int) -> None:
        """Let everybody compensate a gradient that was computed at this version."""
        what = {
            "compensate": [repr(each) for each in coordinator.compensators],
            "worker": arrival.worker,
            "version": version,
            "staleness": coordinator.version - version,
            "squared_norm": arrival.squared_norm,
        }
        self.tell(what)

    # --- what they say -----------------------------------------------------------------------------------------------

    def hear(self, number: int, said: Answer) -> None:
        """Take note of what a server has said of itself.

        Raises:
            UsageError: it cannot work with this job.
            RunError: something went wrong there.
        """
        match said:
            case Updated():
                self._busy.discard(number)
            case {"failed": message, "is_usage": is_usage}:
                if is_usage:
                    raise UsageError(message)
                raise RunError(f"the server of slice {number} failed: {message}; its own log has the traceback")

    def gone(self, number: int, reason: str) -> None:
        """Give the run up: nobody else has these parameters.

        Raises:
            RunError: ever.
        """
        del self._lines[number]
        raise RunError(
            f"the server of slice {number}, beside rank {self._ranks[number]}, is gone: {reason}; nobody else has its "
            "parameters, so see what its host says, start all ranks again, and go on with resume=, as torchrun "
            "does itself with --max-restarts and out="
        )

    def summed(self, shares: Sequence[float]) -> list[float]:
        """Return the sums over all slices, and let everybody know them."""
        theirs = [self._await(number, lambda said: isinstance(said, Sums)).values for number in self.numbers]
        totals = [sum(each) for each in zip(shares, *theirs, strict=True)]
        self.send(sums_of(totals))
        return totals

    def states(self) -> list[dict[str, Any]]:
        """Ask each of them for its state."""
        return self._asked("state")

    def models(self) -> list[dict[str, Any]]:
        """Ask each of them for its part of the model."""
        return self._asked("model")

    def load(self, state: Mapping[str, Any]) -> None:
        """Keep a state for them to begin with."""
        self._loaded = state if self.numbers else None

    def _asked(self, what: str) -> list[dict[str, Any]]:
        self.tell({"wants": what})
        answers = [
            self._await(number, lambda said: isinstance(said, dict) and said.get("given") == what)
            for number in self.numbers
        ]
        return [decode(answer["state"], answer[TENSORS]) for answer in answers]

    def _await(self, number: int, is_answer: Callable[[Answer], bool]) -> Answer:
        """Wait for an answer; whatever else is said in the meantime is heard later."""
        [ticket] = [ticket for ticket, other in self._numbers.items() if other == number]

        def is_wanted(news: News) -> bool:
            if isinstance(news, PeerLost):
                return news.ticket in self._numbers  # whichever it is, the run is over
            if not isinstance(news, PeerMessage) or news.ticket != ticket:
                return False
            return is_answer(news.message) or (isinstance(news.message, dict) and "failed" in news.message)

        news = self.inbox.take(is_wanted)
        if isinstance(news, PeerLost):
            self.gone(self._numbers[news.ticket], news.reason)
        assert isinstance(news, PeerMessage)
        if not is_answer(news.message):
            self.hear(number, news.message)
        return news.message
