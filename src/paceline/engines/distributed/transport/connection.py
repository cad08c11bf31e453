"""Connection between two processes over two sockets: one for messages, one for tensors."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from paceline.engines.distributed.transport import messages
from paceline.engines.distributed.transport.messages import Message, StateMessage
from paceline.engines.distributed.transport.readers import (
    MESSAGE,
    SMALL_BYTES,
    STATE,
    MessageReader,
    TensorReader,
    split_small_buckets,
)
from paceline.engines.distributed.transport.socket_loop import SocketLoop
from paceline.engines.distributed.transport.stream import Stream, StreamSocket
from paceline.engines.distributed.transport.task_messages import CancelTask, Heartbeat, HeartbeatAnswer
from paceline.engines.distributed.transport.tensor_descriptions import allocate
from paceline.engines.distributed.transport.tensor_memory import checked, framed, memory_of_tensor
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
OVERTAKING = (CancelTask, Heartbeat, HeartbeatAnswer)
MOST_OF_PEER_BYTES = (1 << 22) + (
    1 << 12
)  # of a message of a process that joins, which may be its longest error, but for its settings
MAX_WAITING = 1024  # messages that wait for tensors, or for `recv`; a faster sender has to wait
MAX_WAITING_BYTES = 1 << 22  # of messages that wait for tensors; also the next one, of any size, is read before
HEARTBEAT_CHECKS = 12  # per timeout; a pause of this process counts as one check
CLOSING_S = 0.3  # without a byte on the second socket after the end of the first one
CLOSED = "the connection was closed by this process"

OnMessage = Callable[[Message, float, float], None]
OnEnd = Callable[[str], None]


class ConnectionLost(Exception):  # noqa: N818  # every connection ends with the run
    """The connection has ended, or invalid data arrived over it."""


class ArrivedMessage(NamedTuple):
    """Message that has arrived.

    Attributes:
        message: the message.
        buckets: small buckets that came with it, each with its frame.
        tensors: tensors that were sent before it, since the connection began.
        at_s: arrival on the monotonic clock.
        nbytes: bytes of the message.
    """

    message: Message
    buckets: bytes
    tensors: int
    at_s: float
    nbytes: int


# Long: the two sockets, the order of what arrives over them and the heartbeats share one state.
class Connection:
    """Connection to one other process.

    Messages are sent over the control socket, with their buckets if these are small. Other tensors are sent over the
    data socket: numbered buckets, for which the receiver has posted memory, and the tensors of a `StateMessage`. A
    tensor is read straight into its memory, after its size has been compared with that memory. A message is delivered
    when everything sent before it has arrived; only those in `OVERTAKING` do not wait. Memory that is sent must not
    change until the other side has answered.

    Any thread may send. All callbacks come from the thread of the loop. Another thread may read and write the tensors:
    most of it is encryption and the kernel, which leave Python's lock, so several connections use several cores.

    Args:
        loop: thread that reads and writes messages.
        control: connected and authenticated socket.
        data: connected and authenticated socket to the same process.
        heartbeat_timeout_s: seconds without any byte after which the other process counts as lost, > 0.
        counters: counts of bytes.
        data_loop: thread that reads and writes tensors; None for the same one.

    Attributes:
        address: host and port of the other process, for messages.
        peer_host: address of the host of the other process.
        local_host: address of this host towards the other process.
        is_on_this_host: whether the other process has the same address.
        answers_heartbeats: whether the thread of the loop answers heartbeats; else they are delivered, and this side
            asks for heartbeats only while it sends, so that it counts as lost when nothing answers.
        accepts_state: whether the other process may send the tensors of a `StateMessage`.
        waits_for_reader: whether no message is read while the other process leaves many messages unread, so that
            answers fill no memory. At most one side may wait so, since two that do could wait for each other for ever.
    """

    def __init__(
        self,
        loop: SocketLoop,
        control: StreamSocket,
        data: StreamSocket,
        heartbeat_timeout_s: float,
        counters: NetworkCounters,
        data_loop: SocketLoop | None = None,
    ) -> None:
        self.local_host, _ = _name(control.getsockname)
        self.peer_host, port = _name(control.getpeername)
        self.address = f"{self.peer_host}:{port}"
        self.is_on_this_host = self.peer_host == self.local_host
        self.answers_heartbeats = True
        self.accepts_state = True
        self.waits_for_reader = False
        self._loop = loop
        self._data_loop = data_loop or loop
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._idle_checks = 0  # in a row
        self._bytes_calls = 0  # number of times that bytes have come
        self._send_lock = threading.Lock()  # keeps the order of messages and tensors
        self._tensors_sent = 0
        self._arrived: deque[ArrivedMessage] = deque()
        self._arrived_bytes = 0
        self._tensors_arrived = 0
        self._buffers: list[memoryview] = []
        self._state_buffers: deque[memoryview] = deque()
        self._inbox: queue.SimpleQueue[ArrivedMessage | str] = queue.SimpleQueue()
        self._listener: tuple[OnMessage, OnEnd] | None = None
        self._end_reason = ""
        self._open_streams = 2
        self._control = Stream(loop, control, MessageReader(self), counters)
        self._data = Stream(self._data_loop, data, TensorReader(self), counters)
        loop.call(self._start)

    # --- sending ------------------------------------------------------------------------------------------

    @property
    def is_sending(self) -> bool:
        """Whether tensors are queued that the operating system has not taken yet."""
        return self._data.is_sending

    def send(self, message: Message, buckets: Sequence[tuple[int, Tensor]] = ()) -> None:
        """Start to send a message and numbered buckets that belong to it; `on_end` reports a lost connection."""
        content, tensors = messages.encode(message)
        parts = [part for number, tensor in buckets for part in framed(number, tensor)]
        small = b"".join(parts) if sum(map(len, parts)) <= SMALL_BYTES else b""
        if small:
            parts = []
        parts += [part for tensor in tensors if tensor.numel() for part in framed(STATE, tensor)]
        with self._send_lock:
            self._tensors_sent += len(parts) // 2
            before = 0 if isinstance(message, OVERTAKING) else self._tensors_sent
            header = MESSAGE.pack(len(content), len(small), before)
            self._control.send([memoryview(header + content + small)])
            if parts:
                self._data.send(parts)

    def send_bucket(self, number: int, bucket: Tensor) -> None:
        """Start to send a numbered bucket whose message follows later."""
        with self._send_lock:
            self._tensors_sent += 1
            self._data.send(framed(number, bucket))

    # --- receiving ----------------------------------------------------------------------------------------

    def post_buckets(self, buffers: Sequence[Tensor]) -> None:
        """Receive numbered buckets into this memory from now on.

        The other side sends a bucket only when its memory is free, which follows from earlier messages.
        """
        self._buffers = [memory_of_tensor(each) for each in buffers]
        self._data.resume()
        self._loop.call(self._deliver_complete)

    def recv(self, timeout_s: float | None = None) -> Message:
        """Wait for a message; only before `listen`.

        Raises:
            ConnectionLost: the connection has ended, or no message has come within the timeout.
        """
        try:
            arrived = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise ConnectionLost(f"no message came within {timeout_s:g} s") from None
        if isinstance(arrived, str):
            self._inbox.put(arrived)  # for the next call, or the listener
            raise ConnectionLost(arrived)
        if self._inbox.qsize() == MAX_WAITING - 1:  # it was full, so reading had stopped
            self._control.resume()
        return arrived.message

    def listen(self, on_message: OnMessage, on_end: OnEnd) -> None:
        """Call handlers in the thread of the loop from now on; they must not block.

        Args:
            on_message: is called with each message, its arrival on the monotonic clock in seconds, and the seconds from
                then until everything sent before it had arrived.
            on_end: is called once with the reason, after the last message.
        """

        def start() -> None:
            self._listener = on_message, on_end
            while not self._inbox.empty():
                self._deliver(self._inbox.get())
            self._control.resume()

        self._loop.call(start)

    def close(self) -> None:
        """Close the connection now; both sides are notified."""
        self._loop.call(lambda: self.end(CLOSED))

    # --- in the thread of the messages or of the tensors --------------------------------------------------

    def end(self, reason: str) -> None:
        """Close both sockets, if they are still open: at once that of this thread."""
        self._end_reason = self._end_reason or reason
        self._loop.run(lambda: self._control.end(reason))
        self._data_loop.run(lambda: self._data.end(reason))

    def on_stream_end(self, reason: str, *, is_control: bool) -> None:
        """Handle the end of one socket."""
        self._loop.run(lambda: self._on_stream_end(reason, is_control=is_control))

    def on_tensor(self) -> None:
        """Handle that a tensor has arrived."""
        self._loop.run(self._on_tensor)

    def on_bytes(self) -> None:
        """Record that the other process is alive."""
        self._idle_checks = 0
        self._bytes_calls += 1

    def memory_of(self, number: int, nbytes: int) -> memoryview | None:
        """Return the memory of the next tensor; None if it is not known yet.

        Raises:
            ValueError: there is no such bucket, or it has another size.
        """
        if number != STATE:
            return self._bucket(number, nbytes) if self._buffers else None
        return checked(self._state_buffers.popleft(), nbytes) if self._state_buffers else None

    # --- in the thread of the messages --------------------------------------------------------------------

    def _on_stream_end(self, reason: str, *, is_control: bool) -> None:
        """Note the end of one socket: the other one may still have something to read, unless no message waits."""
        self._end_reason = self._end_reason or reason
        self._open_streams -= 1
        if not self._open_streams:
            self._deliver(self._end_reason)
        elif is_control and not self._arrived:
            self.end(reason)
        else:
            self._end_when_silent(reason)

    def _end_when_silent(self, reason: str) -> None:
        """End the connection when no byte has come for some time, of a tensor for which a message waits."""
        before = self._bytes_calls

        def check() -> None:
            if self._bytes_calls == before:
                self.end(reason)
            else:
                self._end_when_silent(reason)

        self._loop.call_later(CLOSING_S, check)

    def is_full(self) -> bool:
        """Return whether no further message is read for now."""
        if self._arrived_bytes >= MAX_WAITING_BYTES:
            return True
        unsent = self._control.unsent if self.waits_for_reader else 0
        return max(len(self._arrived), self._inbox.qsize(), unsent) >= MAX_WAITING

    def on_message(self, content: memoryview, buckets: memoryview, tensors: int) -> None:
        """Deliver a message, or keep it until its tensors have arrived and its buckets have memory."""
        if len(content) > MOST_OF_PEER_BYTES and not self.accepts_state and not messages.is_greeting(content):
            raise ValueError(f"{len(content)} bytes, expected at most {MOST_OF_PEER_BYTES}")
        message: Message = messages.decode(content, of_peer=not self.accepts_state)
        if isinstance(message, StateMessage):
            message = self._with_tensors(message)
        # The buckets are copied, because the reader uses its memory again.
        arrival = ArrivedMessage(
            message=message, buckets=bytes(buckets), tensors=tensors, at_s=time.monotonic(), nbytes=len(content)
        )
        if isinstance(message, OVERTAKING):
            self._deliver(arrival)
        else:
            self._arrived.append(arrival)
            self._arrived_bytes += arrival.nbytes
            self._deliver_complete()

    def _on_tensor(self) -> None:
        """Deliver the messages that have waited for a tensor."""
        self._tensors_arrived += 1
        was_full = self.is_full()
        self._deliver_complete()
        if was_full:
            self._control.resume()

    def _bucket(self, number: int, nbytes: int) -> memoryview:
        if number >= len(self._buffers):
            raise ValueError(f"no bucket {number}")
        return checked(self._buffers[number], nbytes)

    def _start(self) -> None:
        self._control.resume()
        self._data.resume()
        self._loop.call_later(self._heartbeat_timeout_s / HEARTBEAT_CHECKS, self._check_heartbeat)

    def _check_heartbeat(self) -> None:
        if not self._open_streams:
            return
        self._idle_checks += 1
        if self._idle_checks > HEARTBEAT_CHECKS:
            self.end(f"silent for {self._heartbeat_timeout_s:g} s")
            return
        if self._idle_checks > HEARTBEAT_CHECKS // 3 and (self.answers_heartbeats or self.is_sending):
            self.send(Heartbeat())
        self._loop.call_later(self._heartbeat_timeout_s / HEARTBEAT_CHECKS, self._check_heartbeat)

    def _with_tensors(self, message: StateMessage) -> Message:
        """Return the message with memory for its tensors, which are received next.

        Raises:
            ValueError: a tensor is not valid, or too large, or the other process may not send any.
        """
        tensors = allocate(message.described)
        self._state_buffers.extend(memory_of_tensor(tensor) for tensor in tensors.values() if tensor.numel())
        self._data.resume()
        complete: Message = msgspec.structs.replace(message, tensors=tensors, described=b"")  # type: ignore[assignment]
        return complete

    def _deliver_complete(self) -> None:
        while self._arrived and self._arrived[0].tensors <= self._tensors_arrived:
            if self._arrived[0].buckets and not self._buffers:
                return
            arrived = self._arrived.popleft()
            self._arrived_bytes -= arrived.nbytes
            try:
                for number, content in split_small_buckets(arrived.buckets):
                    self._bucket(number, len(content))[:] = content
            except ValueError as error:
                self.end(f"invalid bucket: {error}")
                return
            self._deliver(arrived)

    def _deliver(self, arrived: ArrivedMessage | str) -> None:
        """Deliver a message, or the reason of the end."""
        if self._answer_heartbeat(arrived):
            return
        if self._listener is None:
            self._inbox.put(arrived)
            return
        on_message, on_end = self._listener
        try:
            if isinstance(arrived, str):
                on_end(arrived)
            else:
                on_message(arrived.message, arrived.at_s, time.monotonic() - arrived.at_s)
        except Exception:  # the next message is delivered all the same
            LOG.exception("error in a callback of the connection to %s", self.address)

    def _answer_heartbeat(self, arrived: ArrivedMessage | str) -> bool:
        """Answer a heartbeat; return whether it, or the answer to one, need not be delivered."""
        message = arrived.message if isinstance(arrived, ArrivedMessage) else None
        if isinstance(message, Heartbeat) and self.answers_heartbeats:
            self.send(HeartbeatAnswer())
            return True
        return isinstance(message, HeartbeatAnswer)


def _name(read: Callable[[], Any]) -> tuple[str, int]:
    """Return host and port of a socket; those of a process to itself count as loopback."""
    try:
        name = read()
    except OSError:  # the connection has ended
        return "", 0
    return name[:2] if isinstance(name, tuple) else ("127.0.0.1", 0)
