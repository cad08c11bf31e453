"""Control messages: typed structs that processes send each other beside parameters, gradients and sums."""

from __future__ import annotations

from math import nan
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import RunError, UsageError


class ControlStruct(msgspec.Struct, frozen=True, tag=True):
    """Base of all control messages; the class name is the tag on the wire."""


# --- joining: see `rendezvous.handshake` ------------------------------------------------------------------


class Challenge(ControlStruct, frozen=True):
    """First message of a server: a random number that the peer has to sign with the token."""

    nonce: str


class Proof(ControlStruct, frozen=True):
    """Signature of the other side's nonce, and a nonce for the other side to sign."""

    digest: str
    nonce: str = ""


class Hello(ControlStruct, frozen=True):
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


class Accepted(ControlStruct, frozen=True):
    """The process may take part."""


class Rejected(ControlStruct, frozen=True):
    """The process may not take part."""

    reason: str


# --- leaving, failing, ending -----------------------------------------------------------------------------


class Leave(ControlStruct, frozen=True):
    """The sender ends on purpose, for example after SIGTERM; it waits until the receiver closes the connection."""

    reason: str


class Failed(ControlStruct, frozen=True):
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


class End(ControlStruct, frozen=True):
    """The run is over.

    Attributes:
        outcome: value of an `Outcome`; "failed" after an error.
        reason: why the run ended; the message of the error if it failed.
        time_s: length of the run in seconds.
        is_usage: whether the error is one that the user has to correct.
        has_parameters: whether the final parameters and buffers follow.
    """

    outcome: str
    reason: str
    time_s: float = 0.0
    is_usage: bool = False
    has_parameters: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether an error ended the run."""
        return self.outcome == "failed"

    def with_parameters(self) -> End:
        """Return the message that the final parameters follow."""
        return msgspec.structs.replace(self, has_parameters=True)


class Shutdown(ControlStruct, frozen=True):
    """The processes of a node end with this exit status."""

    status: int


# --- parameter server -------------------------------------------------------------------------------------


class EvaluationResult(ControlStruct, frozen=True):
    """Metrics of a version."""

    version: int
    metrics: dict[str, float]


class FormNodeGroup(ControlStruct, frozen=True):
    """The processes of a node connect to each other under this key."""

    key: str


class ShardAssigned(ControlStruct, frozen=True):
    """The receiver is the server of this shard."""

    shard: int


class StateMessage(ControlStruct, frozen=True):
    """Base of messages with tensors: they follow the message, in the order of their names here.

    Attributes:
        state: JSON text of the state, in which tensors are names.
        tensors: tensors by name.
    """

    state: str
    tensors: dict[str, Any]


class InitShard(StateMessage, frozen=True):
    """A shard server starts from this version, with this state if there is one."""

    version: int


class ShardState(StateMessage, frozen=True):
    """Answer to `RequestShardState`."""

    part: str


class RequestShardState(ControlStruct, frozen=True):
    """The shard server sends its whole "state" or its part of the "model"."""

    part: str


class PeerAdmitted(ControlStruct, frozen=True):
    """A worker has joined a shard server; `peer_id` is its id at rank 0."""

    peer_id: int


class PeerDisconnected(ControlStruct, frozen=True):
    """A shard server has lost the connection to a worker; `peer_id` is its id at rank 0."""

    peer_id: int
    reason: str


class DisconnectPeer(ControlStruct, frozen=True):
    """The shard server closes its connection to a worker; `peer_id` is its id at rank 0."""

    peer_id: int


class CompensateGradient(ControlStruct, frozen=True):
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


# --- all-reduce -------------------------------------------------------------------------------------------


class FormGroup(ControlStruct, frozen=True):
    """The receiver takes its rank in a new group.

    Attributes:
        generation: number of the group, counted from 1.
        key: secret of the group.
        rank: rank of the receiver in the group.
        size: processes in the group.
        uses_nccl: whether NCCL sums; else gloo does.
    """

    generation: int
    key: str
    rank: int
    size: int
    uses_nccl: bool


class GroupBroken(ControlStruct, frozen=True):
    """The sender can no longer sum in its group.

    Attributes:
        generation: number of the group.
        reason: error of the sender.
        is_unreachable: whether two members could never connect.
    """

    generation: int
    reason: str
    is_unreachable: bool


class ProgressRequest(ControlStruct, frozen=True):
    """The receiver reports how far it is in the group of this generation."""

    generation: int


class Progress(ControlStruct, frozen=True):
    """Answer to `ProgressRequest`.

    Attributes:
        generation: number of the sender's group.
        steps: reports and sums that the sender has begun in this group.
        is_summing: whether the sender waits for a sum.
    """

    generation: int
    steps: int
    is_summing: bool


class StepReport(ControlStruct, frozen=True):
    """Scalars of a worker's gradient in one iteration.

    Attributes:
        generation: number of the group.
        draw: number of the worker's task; 0 if it had none.
        loss: loss of the minibatch; this and the next fields as in `Arrival`.
        samples: samples of the minibatch.
        squared_norm: squared norm of the gradient.
        variance: variance of the gradient.
        finite: whether the gradient is finite.
        factor: factor of the correction, nan for none.
        compute_s: seconds for the gradient and for the operations on vectors.
        waited_s: seconds that the worker waited for the previous sum after it had its own gradient.
        interruption: why the worker ends the run; empty if it does not.
    """

    generation: int = 0
    draw: int = 0
    loss: float = nan
    samples: int = 0
    squared_norm: float = nan
    variance: float = nan
    finite: bool = False
    factor: float = nan
    compute_s: float = 0.0
    waited_s: float = 0.0
    interruption: str = ""


class StepSummary(ControlStruct, frozen=True):
    """Reports of all workers in one iteration.

    Attributes:
        generation: number of the group.
        now: seconds since the run began, at rank 0, when the last report arrived.
        reforms: whether a new group forms after this iteration.
        reports: report of each worker, by its number.

    >>> summary = StepSummary(1, 0.25, False, {0: StepReport(1), 2: StepReport(1, 7, 0.5, 8)})
    >>> decode(encode(summary)[0]).reports[2].samples
    8
    """

    generation: int
    now: float
    reforms: bool
    reports: dict[int, StepReport]


class MetricsMeasured(ControlStruct, frozen=True):
    """Metrics that rank 0 has measured in the group of this generation."""

    generation: int
    metrics: dict[str, float]


ControlMessage = (
    Challenge
    | Proof
    | Hello
    | Accepted
    | Rejected
    | Leave
    | Failed
    | End
    | Shutdown
    | EvaluationResult
    | FormNodeGroup
    | ShardAssigned
    | InitShard
    | ShardState
    | RequestShardState
    | PeerAdmitted
    | PeerDisconnected
    | DisconnectPeer
    | CompensateGradient
    | FormGroup
    | GroupBroken
    | ProgressRequest
    | Progress
    | StepReport
    | StepSummary
    | MetricsMeasured
)


def describe(tensor: Any) -> tuple[str, list[int]]:
    """Return dtype and shape of a tensor, as they are sent."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=describe)
_DECODER = msgspec.msgpack.Decoder(ControlMessage)


def encode(message: ControlMessage) -> tuple[Tensor, list[Tensor]]:
    """Return a message as bytes, uint8 [nbytes], and the tensors that follow it."""
    tensors = list(message.tensors.values()) if isinstance(message, StateMessage) else []
    return torch.frombuffer(bytearray(_ENCODER.encode(message)), dtype=torch.uint8), tensors


def decode(content: Tensor) -> ControlMessage:
    """Return the message of such bytes; the tensors of a `StateMessage` are still (dtype, shape).

    Raises:
        ValueError: the bytes are no message.
    """
    try:
        message: ControlMessage = _DECODER.decode(content.numpy().tobytes())
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    return message
