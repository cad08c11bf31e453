"""Follower of the coordinator at one rank: sums, updates and tasks in the order of its messages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.announced_sums.sum_groups import SUMS
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.group_store import GroupStore
from paceline.engines.distributed.transport.messages import Message
from paceline.engines.distributed.transport.sum_messages import AnnounceSum, FormGroup, SendState, StepMade, StoreKey
from paceline.engines.distributed.transport.task_messages import RemoteTask
from paceline.engines.distributed.transport.transport import Transport
from paceline.engines.distributed.worker_tensors import Start
from paceline.errors import RunError
from paceline.server.parameter_server import ParameterServer

Followed = AnnounceSum | FormGroup | SendState | RemoteTask


class UpdateFollower:
    """Follower of the coordinator, in a thread that does not wait for the computation under way.

    A task is passed on after the updates that came before it.

    Args:
        parameters: parameters of this rank.
        server: the server in them.
        connection: connection to the coordinator.
        is_first: whether rank 0 is told of this rank's updates.
        transport: transport of this process.
        start: called with a task, the version at which it is computed, and the moment of its arrival: sums that all
            ranks wait for are not time of this rank.
        fail: called with an error of this thread.
    """

    def __init__(
        self,
        parameters: RankParameters,
        server: ParameterServer,
        connection: Connection,
        *,
        is_first: bool,
        transport: Transport,
        start: Start,
        fail: Callable[[Exception], None],
    ) -> None:
        self._parameters = parameters
        self._server = server
        self._connection = connection
        self._is_first = is_first
        self._transport = transport
        self._start = start
        self._fail = fail
        self._messages: queue.SimpleQueue[tuple[Followed, float] | None] = queue.SimpleQueue()
        self._stores: dict[int, GroupStore] = {}  # by number of the group
        self._groups: dict[int, ElasticGroup] = {}
        self._thread = threading.Thread(target=self._follow, name="paceline-updates", daemon=True)
        self._thread.start()

    def on_message(self, message: Message) -> bool:
        """Take a message of the coordinator, in the thread of the sockets; return whether it is one to follow."""
        match message:
            case StoreKey(generation):
                self._store(generation).put(message)
            case FormGroup(generation=generation):
                store = self._store(generation)
                self._groups[generation] = ElasticGroup(message.key, message.rank, message.size, store)
                self._messages.put((message, time.monotonic()))
            case AnnounceSum() | SendState() | RemoteTask():
                self._messages.put((message, time.monotonic()))
            case _:
                return False
        return True

    def _store(self, generation: int) -> GroupStore:
        """Return the store of a group, of which another rank's keys may come before its announcement."""
        if generation not in self._stores:
            self._stores[generation] = GroupStore(generation, self._connection.send)
        return self._stores[generation]

    def close(self, *, has_failed: bool) -> None:
        """End the thread and the groups."""
        self._messages.put(None)
        for group in list(self._groups.values()):
            if has_failed:  # at a normal end the other ranks may still be summing
                group.abort()
            else:
                group.complete()
        self._thread.join()
        for group in self._groups.values():
            group.close()

    # --- in a thread of its own ---------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while (received := self._messages.get()) is not None:
                message, at_s = received
                self._carry_out(message, at_s)
        except ConnectionLost as error:
            self._fail(RunError(f"this rank can no longer sum with the others, and rank 0 says why: {error}"))
        except Exception as error:
            self._fail(error)

    def _carry_out(self, message: Followed, at_s: float) -> None:
        match message:
            case FormGroup(generation=generation):
                group = self._groups[generation]
                group.connect(self._transport, self._connection.local_host)
                if generation != SUMS:
                    self._states = group
                    self._server.load_state_dict(group.broadcast_state(None))
            case AnnounceSum():
                self._sum(message)
            case SendState():
                state: dict[str, Any] = self._server.state_dict()
                self._states.broadcast_state(state, root=1)
            case RemoteTask():
                version = self._parameters.begin_task(keeps=message.progress.last == "used")
                self._start(message, version, at_s)

    def _sum(self, announced: AnnounceSum) -> None:
        """Sum the gradients that count, and make the update if it is due."""
        parameters, gradients, update = self._parameters, announced.summed, announced.made
        if gradients:
            group = self._groups[SUMS]
            parameters.write_terms(gradients)
            group.wait(group.begin_sum(parameters.total))
            parameters.add_sum(gradients, IndexBits(announced.missing))
        if update is None:
            parameters.keep_sum()
            return
        step = parameters.apply(update)
        if self._is_first and (step is not None or parameters.not_finite):
            self._connection.send(StepMade.of(update.version, step, parameters.not_finite))
