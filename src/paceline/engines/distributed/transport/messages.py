"""Messages between processes: typed structs, of which nothing is pickled or executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta
from torch import Tensor

from paceline.core.bounds import LONGEST_TEXT, Port, Whole
from paceline.engines.distributed.transport import announced_messages, standby_messages, sum_messages, task_messages
from paceline.engines.distributed.transport.announced_messages import AnnouncedMessage
from paceline.engines.distributed.transport.encoded import encoded
from paceline.engines.distributed.transport.memory_messages import MemoryMapped, MemoryMessage
from paceline.engines.distributed.transport.message_errors import name_of, with_names
from paceline.engines.distributed.transport.standby_messages import StandbyMessage
from paceline.engines.distributed.transport.sum_messages import SumMessage
from paceline.engines.distributed.transport.task_messages import MessageStruct, TaskMessage
from paceline.engines.distributed.transport.tensor_descriptions import encoded_descriptions
from paceline.errors import RunError, UsageError
from paceline.utils.wording import printable

LONGEST_SENT = 1 << 20  # characters of an error
LONGEST_STATE = 1 << 22  # characters of a state without its tensors; they take up to 25 bytes each once decoded


class StateMessage(MessageStruct, frozen=True, kw_only=True):
    """Base of messages with tensors, which are sent after them in this order.

    Attributes:
        tensors: tensors by name; empty in the encoded message.
        described: descriptions of the tensors, in the encoded message.
    """

    tensors: Annotated[dict[str, Any], Meta(max_length=0)] = msgspec.field(default_factory=dict)
    described: bytes = b""


# --- joining: see `rendezvous.handshake` ------------------------------------------------------------------


class Hello(MessageStruct, frozen=True, kw_only=True):
    """Introduction of a process that wants to join.

    Attributes:
        name: name of the process in messages, with rank, host and process id.
        worker: number of the worker, of the shard server or, within a node, local rank.
        job_spec: settings that must be equal on all processes, encoded: a hostile one takes 70 times its bytes decoded.
        peer_id: id of this process at rank 0, for servers of other shards; 0 when rank 0 is the receiver.
        gpu: identifier of the GPU on which the process computes; empty for none.
        shard: number of the shard that the process has of the replica of its worker.
        process: random text that no other process has, of a worker.
        version: newest version that a worker without a server has from an earlier connection; -1 for none.
    """

    name: str
    worker: int
    job_spec: bytes
    peer_id: int = 0
    gpu: str = ""
    shard: Whole = 0
    process: str = ""
    version: int = -1

    @classmethod
    def of(cls, name: str, worker: int, job_spec: Mapping[str, Any], **more: Any) -> Hello:
        """Return the introduction with these settings; the other arguments are the fields."""
        return cls(name=name, worker=worker, job_spec=encoded(job_spec), **more)


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
        whole: text of the error, which is neither short nor printable.
        is_usage: whether the user has to change something.
    """

    whole: Annotated[str, Meta(max_length=LONGEST_SENT)]
    is_usage: bool

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Return the message about an exception.

        >>> Failed.of(ValueError("no such class")).message
        'ValueError: no such class'
        """
        is_usage = isinstance(error, UsageError)
        text = str(error) if is_usage else f"{type(error).__name__}: {error}"
        text = text[:LONGEST_SENT].encode(errors="backslashreplace").decode()  # it may name a file that is not UTF-8
        return cls(text[:LONGEST_SENT], is_usage)

    @property
    def message(self) -> str:
        """Text of the error, short and printable."""
        return printable(self.whole, LONGEST_TEXT)

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


class ShardListens(MessageStruct, frozen=True):
    """The server of a shard listens on this port of its host."""

    port: Port


Addresses = list[tuple[str, Port]]


class ShardAddresses(MessageStruct, frozen=True):
    """All shard servers listen: their addresses, from shard 1 on, encoded as `Addresses`."""

    addresses: bytes


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

    state: Annotated[str, Meta(max_length=LONGEST_STATE)]
    version: int


class ShardState(StateMessage, frozen=True):
    """Answer to `RequestShardState`; `state` as in `InitShard`."""

    state: Annotated[str, Meta(max_length=LONGEST_STATE)]
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


class FollowUpdate(StateMessage, frozen=True):
    """Events that rank 0 has handled, and the mean gradient of the update that the last one has made.

    Attributes:
        tensors: under "mean", the memory of the mean gradient and of the changes of the buffers, if there is an update.
        events: events since the message before, in order, as `joined_events` returns them.
        version: version that the update makes; 0 without an update.
        missing: indices of the model's parameters without a gradient in it, as the content of `IndexBits`.
        processes: processes of the workers that take part now, each as in `Hello`; their list, encoded.
        made: newest version that all ranks are known to have, without a server.
        options: options of the parameter groups for the step, which the loops of workers have set, encoded.
        first: digest of the state with which the server begins, at the beginning; empty without a server.
    """

    events: bytes
    version: int = 0
    missing: bytes = b""
    processes: bytes = b""
    made: int = 0
    options: bytes = b""
    first: str = ""


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
    | FollowUpdate
)

# None has a list whose length its receiver does not know.
Message = ControlMessage | StandbyMessage | SumMessage | AnnouncedMessage | MemoryMessage | TaskMessage

# What a server takes from a process that joins.
PeerMessage = (
    Hello
    | Leave
    | Pause
    | Resume
    | Failed
    | LeaderListens
    | FindLeader
    | standby_messages.StandbyListens
    | standby_messages.StandbyForgotten
    | standby_messages.UpdateReceived
    | sum_messages.StoreKey
    | sum_messages.GroupBroken
    | sum_messages.Progress
    | sum_messages.StepReport
    | announced_messages.RankAnswer
    | MemoryMapped
    | task_messages.TaskAnswer
)

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_DECODER_OF_PEERS: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(PeerMessage)
_TEXTS = {  # but for states, which are data
    kind: [name for name, of in get_type_hints(kind).items() if of is str and name not in {"state", "key", "whole"}]
    for kind in get_args(Message)
}
_KINDS = {kind.__name__: kind for kind in get_args(Message)}
_KINDS_OF_PEERS = {kind.__name__: kind for kind in get_args(PeerMessage)}


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Return a message as bytes, and the tensors that are sent after it."""
    tensors: list[Tensor] = []
    if isinstance(message, StateMessage):
        tensors = list(message.tensors.values())
        message = msgspec.structs.replace(message, tensors={}, described=encoded_descriptions(message.tensors))
    try:
        return encoded(message), tensors
    except UnicodeEncodeError:  # a text names a file whose name is not UTF-8
        return encoded(_with_printable_texts(message)), tensors


def decode(content: bytes | memoryview, *, of_peer: bool = False) -> Message:
    """Return the message of such bytes, which takes at most four times their number.

    Args:
        content: bytes of the message.
        of_peer: whether a process has sent it to the server that it joins.

    Raises:
        ValueError: the bytes are no message, or none that such a process may send.
    """
    decoder, kinds = (_DECODER_OF_PEERS, _KINDS_OF_PEERS) if of_peer else (_DECODER, _KINDS)
    if (kind := kinds.get(name_of(content))) is None:
        raise ValueError("no message that is known, or none that its sender may send")
    try:
        return _with_printable_texts(decoder.decode(content))
    except msgspec.ValidationError as error:
        raise ValueError(with_names(str(error), kind)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def is_greeting(content: bytes | memoryview) -> bool:
    """Return whether the bytes of a message begin as those of a `Hello`."""
    return name_of(content) == Hello.__name__


def _with_printable_texts(message: Message) -> Message:
    """Return a message whose texts are short and have no control characters, as a terminal and the log need them."""
    changes: dict[str, Any] = {}
    texts = _TEXTS[type(message)]
    for name, text in zip(message.__struct_fields__, msgspec.structs.astuple(message), strict=True):
        if name not in texts:
            continue
        if len(text) > LONGEST_TEXT or not text.isprintable():
            changes[name] = printable(text, LONGEST_TEXT)
    return msgspec.structs.replace(message, **changes) if changes else message
