"""Messages between processes: typed structs, of which nothing is pickled or executed."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import msgspec
import torch
from torch import Tensor

from paceline.core.bounds import Port, Whole
from paceline.engines.distributed.transport.standby_messages import FollowedEvent, StandbyMessage
from paceline.engines.distributed.transport.sum_messages import SumMessage
from paceline.engines.distributed.transport.task_messages import MessageStruct, TaskMessage
from paceline.errors import RunError, UsageError


class StateMessage(MessageStruct, frozen=True, kw_only=True):
    """Base of messages with tensors, which are sent after them in this order.

    Attributes:
        tensors: tensors by name; in the encoded message, their dtype and shape.
    """

    tensors: dict[str, Any] = msgspec.field(default_factory=dict)


# --- joining: see `rendezvous.handshake` ------------------------------------------------------------------


class Hello(MessageStruct, frozen=True):
    """Introduction of a process that wants to join.

    Attributes:
        name: name of the process in messages, with rank, host and process id.
        worker: number of the worker, of the shard server or, within a node, local rank.
        job_spec: settings that must be equal on all processes.
        peer_id: id of this process at rank 0, for servers of other shards; 0 when rank 0 is the receiver.
        has_own_gpu: whether the process has a GPU that no other process uses.
    """

    name: str
    worker: int
    job_spec: dict[str, Any]
    peer_id: int = 0
    has_own_gpu: bool = False


class Accepted(MessageStruct, frozen=True):
    """The process may take part; `peer_id` is its id at the server."""

    peer_id: int


class Rejected(MessageStruct, frozen=True):
    """The process may not take part."""

    reason: str


# --- leaving, failing, ending -----------------------------------------------------------------------------


class Leave(MessageStruct, frozen=True):
    """The sender ends on purpose, for example after SIGTERM; it waits until the receiver closes the connection."""

    reason: str


class Pause(MessageStruct, frozen=True):
    """The worker takes no part for a while; its task is cancelled."""

    reason: str


class Resume(MessageStruct, frozen=True):
    """The worker takes part again after a pause."""


class Failed(MessageStruct, frozen=True):
    """The sender ends after an error.

    Attributes:
        message: one line; the sender logs the traceback.
        is_usage: whether the user has to change something.
    """

    message: str
    is_usage: bool

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Return the message about an exception.

        >>> Failed.of(ValueError("no such class")).message
        'ValueError: no such class'
        """
        is_usage = isinstance(error, UsageError)
        return cls(str(error) if is_usage else f"{type(error).__name__}: {error}", is_usage)

    @property
    def error(self) -> UsageError | RunError:
        """The error that this process raises because of it."""
        return (UsageError if self.is_usage else RunError)(self.message)


class End(StateMessage, frozen=True):
    """The run is over.

    Attributes:
        tensors: under "final", the memory of the final parameters and buffers, if the receiver gets them.
        outcome: value of an `Outcome`; "failed" after an error.
        reason: why the run ended; the message of the error if it failed.
        time_s: length of the run in seconds.
        is_usage: whether the error is one that the user has to correct.
        updates: updates made.
        workload: gradients applied.
    """

    outcome: str
    reason: str
    time_s: float = 0.0
    is_usage: bool = False
    updates: int = 0
    workload: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether an error ended the run."""
        return self.outcome == "failed"

    def with_parameters(self, memory: Tensor) -> End:
        """Return the message with the memory of the final parameters and buffers."""
        return msgspec.structs.replace(self, tensors={"final": memory})


class Shutdown(MessageStruct, frozen=True):
    """The processes of a node end with this exit status."""

    status: int


# --- parameter server -------------------------------------------------------------------------------------


class EvaluationResult(MessageStruct, frozen=True):
    """Metrics of a version."""

    version: int
    metrics: dict[str, float]


class ShardListens(MessageStruct, frozen=True):
    """The server of a shard listens on this port of its host."""

    port: Port


class ShardAddresses(MessageStruct, frozen=True):
    """All shard servers listen: their addresses, from shard 1 on."""

    addresses: list[tuple[str, Port]]


class LeaderListens(MessageStruct, frozen=True):
    """The leader of a worker's node listens on this port of its host; sent on a connection of its own."""

    worker: Whole
    port: Port


class FindLeader(MessageStruct, frozen=True):
    """Question for the port of the leader of this worker's node; sent on a connection of its own."""

    worker: int


class LeaderPort(MessageStruct, frozen=True):
    """Answer to `FindLeader`: the port; None if the leader does not listen yet."""

    port: Port | None


class FormNodeGroup(MessageStruct, frozen=True):
    """The processes of a node connect to each other under this key."""

    key: str


class ShardAssigned(MessageStruct, frozen=True):
    """The receiver is the server of this shard."""

    shard: int


class InitShard(StateMessage, frozen=True):
    """A shard server starts from this version, with this state if there is one.

    Attributes:
        state: JSON text of the state, in which tensors are names; empty for none.
        version: first version.
    """

    state: str
    version: int


class ShardState(StateMessage, frozen=True):
    """Answer to `RequestShardState`; `state` as in `InitShard`."""

    state: str
    part: str


class RequestShardState(MessageStruct, frozen=True):
    """The shard server sends its whole "state" or its part of the "model"."""

    part: str


class PeerAdmitted(MessageStruct, frozen=True):
    """A worker has joined a shard server; `peer_id` is its id at rank 0."""

    peer_id: int


class PeerDisconnected(MessageStruct, frozen=True):
    """A shard server has lost the connection to a worker; `peer_id` is its id at rank 0."""

    peer_id: int
    reason: str


class DisconnectPeer(MessageStruct, frozen=True):
    """The shard server closes its connection to a worker; `peer_id` is its id at rank 0."""

    peer_id: int


class CompensateGradient(MessageStruct, frozen=True):
    """The shard server compensates its part of a gradient for its staleness.

    Attributes:
        compensators: their text forms, in the order in which they act.
        worker: number of the worker whose gradient is compensated.
        version: version at which the gradient was computed.
        staleness: updates since that version.
        squared_norm: squared norm of the whole gradient.
    """

    compensators: list[str]
    worker: int
    version: int
    staleness: int
    squared_norm: float


# --- standby: see also `standby_messages` -----------------------------------------------------------------


class FollowUpdate(StateMessage, frozen=True):
    """Events that rank 0 has handled, and the mean gradient of the update that the last one has made.

    Attributes:
        tensors: under "mean", the memory of the mean gradient and of the changes of the buffers, if there is an update.
        events: events since the message before, in order.
        version: version that the update makes; 0 without an update.
        missing: indices of the model's parameters without a gradient in it.
    """

    events: list[FollowedEvent]
    version: int = 0
    missing: tuple[int, ...] = ()


ControlMessage = (
    Hello
    | Accepted
    | Rejected
    | Leave
    | Pause
    | Resume
    | Failed
    | End
    | Shutdown
    | EvaluationResult
    | ShardListens
    | ShardAddresses
    | LeaderListens
    | FindLeader
    | LeaderPort
    | FormNodeGroup
    | ShardAssigned
    | InitShard
    | ShardState
    | RequestShardState
    | PeerAdmitted
    | PeerDisconnected
    | DisconnectPeer
    | CompensateGradient
    | FollowUpdate
)


Message = ControlMessage | StandbyMessage | SumMessage | TaskMessage


MAX_NAMED_BYTES = 1 << 16  # of a message whose wrong field is named in the error

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not re.search("bits|q", str(dtype))
}


def describe(tensor: Any) -> tuple[str, list[int]]:
    """Return dtype and shape of a tensor, as they are sent."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=describe)
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Return a message as bytes, and the tensors that are sent after it."""
    return _ENCODER.encode(message), list(message.tensors.values()) if isinstance(message, StateMessage) else []


def decode(content: bytes | memoryview) -> Message:
    """Return the message of such bytes; the tensors of a `StateMessage` are still (dtype, shape).

    Raises:
        ValueError: the bytes are no message.
    """
    try:
        return _DECODER.decode(content)
    except msgspec.ValidationError as error:
        raise ValueError(_with_names(content, str(error))) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _with_names(content: bytes | memoryview, text: str) -> str:
    """Return the text of an error of msgspec with the names of message and field in place of positions."""
    expected, _, place = text.partition(" - at ")
    kind: Any = _kind_of(content) if len(content) <= MAX_NAMED_BYTES else None
    if kind is None:
        return text
    names, first = [kind.__name__], 1  # the name of the message comes before its fields
    for position in map(int, re.findall(r"\[(\d+)\]", place)):
        known = getattr(kind, "__struct_fields__", getattr(kind, "_fields", None))
        if known is None:
            break
        names.append(known[position - first])
        kind, first = get_type_hints(kind).get(names[-1]), 0
    return f"{'.'.join(names)}: {expected[:1].lower()}{expected[1:]}"


def _kind_of(content: bytes | memoryview) -> type[Any] | None:
    """Return the class that a message names; None if it names none."""
    try:
        fields = msgspec.msgpack.decode(content, type=list[msgspec.Raw])
        return _KINDS.get(msgspec.msgpack.decode(fields[0], type=str)) if fields else None
    except (msgspec.DecodeError, RecursionError):
        return None
