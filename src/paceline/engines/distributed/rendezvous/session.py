"""Client session: the connection of a process to a server that has admitted it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from paceline.clusters.torchrun import Torchrun
from paceline.coordinator.coordinator import Coordinator
from paceline.core.events import EndRun, Outcome
from paceline.engines.distributed.rendezvous.handshake import RunFinished
from paceline.engines.distributed.transport import messages, standby_messages
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.transport import Address, Transport
from paceline.errors import RunError, UsageError, describe_error
from paceline.tensors.flat_buffers import FlatBuffers, FlatLayout

LEAVE_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0  # of a server to a process that joins


class ServerLostError(RunError):
    """The connection to the server has ended."""


class FinalState(NamedTuple):
    """Result of a run.

    Attributes:
        parameters: final parameters and buffers.
        end: outcome and reason.
    """

    parameters: FlatBuffers
    end: messages.End


class ClientSession:
    """Connection to a server from the admission of this process to the end of the run.

    Args:
        connection: connection over which this process was admitted.
        peer_id: id of this process at the server.
        server: name of the server in messages.

    Attributes:
        connection: as given.
        peer_id: as given.
    """

    def __init__(self, connection: Connection, peer_id: int = 0, server: str = "rank 0") -> None:
        self.connection = connection
        self.peer_id = peer_id
        self._server = server
        self._is_listening = False
        self._is_over = threading.Event()  # set when the server has announced the end, or is gone
        self._is_closed = threading.Event()

    @classmethod
    def connect(
        cls, transport: Transport, address: Address, hello: messages.Hello, server: str = "rank 0"
    ) -> ClientSession:
        """Join the server at an address.

        Raises:
            UsageError: the server rejects this process.
            ConnectionLost: the server does not answer.
            RunFinished: the run has ended.
        """
        connection = transport.connect(address)
        try:
            connection.send(hello)
            match connection.recv(ANSWER_TIMEOUT_S):
                case messages.Accepted(peer_id):
                    return cls(connection, peer_id, server)
                case messages.Rejected(reason):
                    raise UsageError(reason)
                case messages.End() as end:
                    raise RunFinished(end)
                case standby_messages.NotServing():
                    raise ConnectionLost("the standby follows rank 0, which is still there")
                case message:
                    raise ConnectionLost(f"{server} has sent {type(message).__name__} to a process that joins")
        except BaseException:
            connection.close()
            raise

    def listen(self, on_message: Callable[[Message], None], on_error: Callable[[Exception], None]) -> None:
        """Call handlers in the thread of the sockets until the run ends.

        Args:
            on_message: callback for each message.
            on_error: callback for the first error of the other callback; a lost connection is a RunError.
        """

        def handle(message: Message, at_s: float, contents_s: float) -> None:
            if self._is_over.is_set():
                return
            try:
                on_message(message)
            except Exception as error:
                self._is_over.set()
                on_error(error)
            if isinstance(message, messages.End | messages.Shutdown):
                self._is_over.set()

        def end(reason: str) -> None:
            if not self._is_over.is_set():
                on_error(ServerLostError(f"{self._server} is gone: {reason}"))
            self._is_over.set()
            self._is_closed.set()

        self._is_listening = True
        self.connection.listen(handle, end)

    def leave(self, reason: str) -> None:
        """Report that this process ends, and wait until the server closes the connection."""
        self.finish(messages.Leave(reason))

    def fail(self, error: BaseException) -> None:
        """Report an error of this process, and wait until the server closes the connection."""
        self.finish(messages.Failed.of(error))

    def finish(self, message: Message) -> None:
        """Send a last message, and wait until the server has ended the run or closes the connection.

        The timeout begins anew while a gradient before the message is being sent.
        """
        if self._is_listening and not self._is_over.is_set():
            self.connection.send(message)
            while not self._is_over.wait(LEAVE_TIMEOUT_S) and self.connection.is_sending:
                pass

    def close(self) -> None:
        """Close the connection, and wait until the last callback has returned."""
        self.connection.close()
        if self._is_listening:
            self._is_closed.wait(LEAVE_TIMEOUT_S)


def final_state(end: messages.End, layout: FlatLayout) -> FinalState:
    """Return the end of the run with the final parameters.

    Raises:
        ConnectionLost: rank 0 has sent another number of bytes.
    """
    parameters = layout.allocate()
    sent = end.tensors["final"]
    if sent.shape != parameters.memory.shape:
        raise ConnectionLost(f"{sent.numel()} bytes of final parameters, but {parameters.memory.numel()} were expected")
    parameters.memory.copy_(sent)
    return FinalState(parameters, end)


@contextmanager
def raising_run_error(server: str = "rank 0") -> Iterator[None]:
    """Raise RunError where the connection to a server is lost."""
    try:
        yield
    except ConnectionLost as error:
        raise RunError(f"{server} is gone: {error}") from error


def describe_process(what: str, cluster: Torchrun) -> str:
    """Return the name of this process in messages of other processes."""
    return f"{what} (rank {cluster.ranks.launch_rank}, {socket.gethostname()}, process {os.getpid()})"


def successful_end(last: EndRun, now: float, coordinator: Coordinator) -> messages.End:
    """Return the message about a run that ended with this command after this many seconds."""
    updates, workload = coordinator.version, coordinator.workload
    return messages.End(last.outcome.value, last.reason, now, updates=updates, workload=workload)


def failed_end(error: BaseException) -> messages.End:
    """Return the message about a run that ended with an error."""
    return messages.End(Outcome.FAILED.value, describe_error(error), is_usage=isinstance(error, UsageError))
