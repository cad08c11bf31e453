"""Tensors of a run at its coordinator: how versions reach the workers, and what becomes of their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.core.events import Event, Step
from paceline.engines.distributed.parameter_server.remote_worker import ArrivingGradient, RemoteWorker
from paceline.engines.distributed.rendezvous.acceptor import AcceptedPeer, PeerHandler
from paceline.engines.distributed.standby.standby_stream import StandbyStream
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.task_board import ProcessParameters


class PeerReceiver(PeerHandler, Protocol):
    """Receiver of the messages of other processes, before they wait for the coordinator."""

    def on_accept(self, peer: AcceptedPeer) -> None:
        """Handle a process that does not know yet that it takes part."""


class SentVersion(NamedTuple):
    """Version that goes to a worker with its task.

    Attributes:
        is_new: whether it is sent; the worker has it otherwise.
        buckets: its numbered buckets.
        is_difference: whether they are the difference to the version before.
        checksum: checksum of the version, in debug mode.
        early: number of the group that sums the worker's gradient while it is computed; 0 for none.
        slot: number of the version in memory that the worker shares; -1 for none.
    """

    is_new: bool = False
    buckets: list[tuple[int, Tensor]] = []  # noqa: RUF012  # never changed
    is_difference: bool = False
    checksum: int | None = None
    early: int = 0
    slot: int = -1


class Taken(NamedTuple):
    """Version with which a standby takes the place of rank 0.

    Attributes:
        version: number of the version.
        step: step of its update, if a worker has measured it.
    """

    version: int
    step: Step | None = None


class CoordinatorTensors(ABC):
    """Versions and gradients of a run whose workers are processes.

    Attributes:
        parameters: parameters of the run.
        receiver: receiver of what comes from other processes.
    """

    parameters: ProcessParameters
    receiver: PeerReceiver

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether the coordinator waits for the workers, so that none may join or leave."""

    @abstractmethod
    def begin(self, workers: Iterable[RemoteWorker]) -> None:
        """Begin the run with these workers, when all that it needs have joined."""

    @abstractmethod
    def follow(self, stream: StandbyStream) -> None:
        """Pass every update on to a standby."""

    @abstractmethod
    def take_over(self, workers: Iterable[RemoteWorker], newest: int) -> Taken:
        """Go on with the workers of rank 0, which is lost; return the version with which the run goes on.

        Args:
            workers: workers that have come.
            newest: newest version that one of them may have.
        """

    @abstractmethod
    def admit(self, worker: RemoteWorker) -> None:
        """Let a worker take part that has joined while the run goes on."""

    @abstractmethod
    def version_for(self, worker: RemoteWorker, version: int) -> SentVersion:
        """Return what is sent of a version with a task."""

    @abstractmethod
    def on_message(self, worker: RemoteWorker, message: Message, now_s: float) -> Event | None:
        """Handle a message of a worker about tensors; return what it means for the run, if anything.

        Args:
            worker: worker that has sent it.
            message: the message.
            now_s: time of the run in seconds.

        Raises:
            ValueError: it cannot be one of an honest worker.
        """

    @abstractmethod
    def on_gradient(self, worker: int, arriving: ArrivingGradient, seconds: float) -> None:
        """Note a gradient that has arrived, after a transfer of some seconds."""

    @abstractmethod
    def settle(self) -> None:
        """Let the workers go on after the loss of one."""

    @abstractmethod
    def leaving(self) -> None:
        """Note that a worker is about to leave on purpose."""

    @abstractmethod
    def lose(self, worker: RemoteWorker) -> None:
        """Note that a worker is gone."""

    @abstractmethod
    def ended(self) -> None:
        """Bring the last version to this process."""

    @abstractmethod
    def close(self) -> None:
        """Release what was started; the workers have ended."""
