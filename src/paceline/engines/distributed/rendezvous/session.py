"""Client session: the authenticated connection of a process to a server, and the thread that receives from it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

from paceline.clusters.torchrun import Torchrun
from paceline.core.events import EndRun, Outcome
from paceline.engines.distributed.rendezvous.handshake import authenticate_self
from paceline.engines.distributed.rendezvous.rendezvous import join
from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost, Message
from paceline.engines.distributed.transport.transport import Endpoint
from paceline.errors import RunError, UsageError, describe_error
from paceline.server.flat_buffers import FlatBuffers, FlatLayout

LEAVE_TIMEOUT_S = 10.0


class FinalState(NamedTuple):
    """Result of a run.

    Attributes:
        parameters: final parameters and buffers.
        end: outcome and reason.
    """

    parameters: FlatBuffers
    end: messages.End


class ClientSession:
    """Connection to a server from the handshake to the end of the run.

    Args:
        connection: connection on which this process is authenticated.
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
        self._listener: threading.Thread | None = None

    @classmethod
    def connect(cls, endpoint: Endpoint, cluster: Torchrun, hello: messages.Hello, server: str = "rank 0") -> Self:
        """Join the server at an endpoint.

        Raises:
            UsageError: the server rejects this process.
            ConnectionLost: the server does not answer.
            RunFinished: the run has ended.
        """
        peer_id, connection = join(endpoint, cluster)
        try:
            authenticate_self(connection, cluster.ranks.token, hello)
        except BaseException:
            connection.close()
            raise
        return cls(connection, peer_id, server)

    def listen(self, on_message: Callable[[Message], None], on_error: Callable[[Exception], None]) -> None:
        """Start the thread that receives until the run ends.

        Args:
            on_message: callback for each message.
            on_error: callback for the error that ends the thread; a lost connection is a RunError.
        """

        def receive() -> None:
            try:
                with raising_run_error(self._server):
                    while True:
                        message = self.connection.recv()
                        on_message(message)
                        if isinstance(message, messages.End | messages.Shutdown):
                            return
            except Exception as error:
                on_error(error)

        self._listener = threading.Thread(target=receive, daemon=True)
        self._listener.start()

    def leave(self, reason: str) -> None:
        """Report that this process ends, and wait until the server closes the connection."""
        self.finish(messages.Leave(reason))

    def fail(self, error: BaseException) -> None:
        """Report an error of this process, and wait until the server closes the connection."""
        self.finish(messages.Failed.of(error))

    def finish(self, message: messages.ControlMessage) -> None:
        """Send a last message, and wait until the server closes the connection."""
        if self._listener is not None and self._listener.is_alive():
            self.connection.send(message)
            self._listener.join(LEAVE_TIMEOUT_S)

    def recv_final_state(self, end: messages.End, layout: FlatLayout) -> FinalState:
        """Receive the parameters that follow the end of the run."""
        parameters = layout.allocate()
        self.connection.recv_into(parameters.memory)
        return FinalState(parameters, end)

    def close(self) -> None:
        """Close the connection and wait for the thread."""
        self.connection.close()
        if self._listener is not None:
            self._listener.join()


@contextmanager
def raising_run_error(server: str = "rank 0") -> Iterator[None]:
    """Raise RunError where the connection to a server is lost."""
    try:
        yield
    except ConnectionLost as error:
        raise RunError(f"{server} is gone: {error}") from error


def describe_process(what: str, cluster: Torchrun) -> str:
    """Return the name of this process in messages of other processes."""
    return f"{what} (rank {cluster.ranks.rank}, {socket.gethostname()}, process {os.getpid()})"


def successful_end(last: EndRun, now: float) -> messages.End:
    """Return the message about a run that ended with this command after this many seconds."""
    return messages.End(last.outcome.value, last.reason, now)


def failed_end(error: BaseException) -> messages.End:
    """Return the message about a run that ended with an error."""
    return messages.End(Outcome.FAILED.value, describe_error(error), is_usage=isinstance(error, UsageError))
