"""Follower of the coordinator at one rank: sums, updates and tasks in the order of its messages."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from paceline.core.index_bits import IndexBits
from paceline.engines.distributed.allreduce.elastic_group import ElasticGroup, Unreachable
from paceline.engines.distributed.announced_sums.rank_groups import RankGroups
from paceline.engines.distributed.announced_sums.rank_parameters import RankParameters
from paceline.engines.distributed.announced_sums.shard_group import OwnShard
from paceline.engines.distributed.parameter_server.loop_options import set_step_options
from paceline.engines.distributed.transport.announced_messages import (
    LOST,
    AnnounceSum,
    BeginShards,
    GradientRecomputed,
    RecomputeGradient,
    ResumeSums,
    SaveShards,
    SendState,
    ShardSaved,
    StateFollows,
    StepMade,
    SummedGradient,
    SumsMade,
)
from paceline.engines.distributed.transport.connection import Connection, ConnectionLost
from paceline.engines.distributed.transport.messages import End, Message
from paceline.engines.distributed.transport.sum_messages import FormGroup, GroupBroken, StoreKey
from paceline.engines.distributed.transport.task_messages import RemoteTask
from paceline.engines.distributed.transport.transport import Transport
from paceline.engines.distributed.worker_tensors import Recomputation, Start
from paceline.errors import RunError, UsageError
from paceline.server.parameter_server import ParameterServer

Followed = AnnounceSum | FormGroup | GroupBroken | BeginShards | SendState | SaveShards | RemoteTask | End
OfRecovery = FormGroup | RecomputeGradient | ResumeSums
END_S = 5.0  # for the last sum of a run, of which rank 0 has the result


class Closed(Exception):  # noqa: N818  # no error
    """The rank has ended."""


class UpdateFollower:
    """Follower of the coordinator, in a thread that does not wait for the computation under way.

    A task is passed on after the updates that came before it. When a sum fails, since a rank is lost, the ranks form a
    new group, agree on the sums that are made, compute the gradients of the lost rank that count, and go on with the
    sum.

    Args:
        parameters: parameters of this rank.
        server: the server in them.
        connection: connection to the coordinator.
        transport: transport of this process.
        step: newest step that the coordinator may wait for, from an earlier connection.
        start: called with a task, the version at which it is computed, and the moment of its arrival: sums that all
            ranks wait for are not time of this rank.
        fail: called with an error of this thread.
        shard: shard of this rank; None for a whole replica.

    Attributes:
        step: newest step that the coordinator may wait for.
    """

    def __init__(
        self,
        parameters: RankParameters,
        server: ParameterServer,
        connection: Connection,
        *,
        transport: Transport,
        step: StepMade | None,
        start: Start,
        fail: Callable[[Exception], None],
        shard: OwnShard | None = None,
    ) -> None:
        self._parameters = parameters
        self._server = server
        self._connection = connection
        self._transport = transport
        self._start = start
        self._fail = fail
        self._messages: queue.SimpleQueue[tuple[Followed, float] | None] = queue.SimpleQueue()
        self._recovery: queue.SimpleQueue[OfRecovery | None] = queue.SimpleQueue()
        self._is_broken = False  # whether groups are announced for a recovery, which does not wait for other messages
        self._shard = shard
        self._groups = RankGroups(connection.send, None if shard is None else shard.group.local_rank)
        self._states: ElasticGroup | None = None  # group with the coordinator
        self._sums: FormGroup | None = None  # group with the other ranks
        self._made = 0  # number of the newest sum that this rank has
        self._summing: Sequence[SummedGradient] = ()  # gradients of the sum in progress
        self._is_early = False  # whether that has begun before it was announced
        self._moved: dict[tuple[int, int], SummedGradient] = {}  # gradients that another rank has now
        self.step = step
        self._thread = threading.Thread(target=self._follow, name="paceline-updates", daemon=True)
        self._thread.start()

    def on_message(self, message: Message) -> bool:
        """Take a message of the coordinator, in the thread of the sockets; return whether it is one to follow."""
        match message:
            case StoreKey():
                self._groups.put(message)
            case FormGroup():
                self._groups.announce(message)
                if self._is_broken:
                    self._recovery.put(message)
                else:
                    self._messages.put((message, time.monotonic()))
            case GroupBroken():
                self._is_broken = True
                self._messages.put((message, time.monotonic()))  # for a thread that is in no sum
                self._groups.break_off()
            case RecomputeGradient():
                self._recovery.put(message)
            case ResumeSums():
                self._is_broken = False
                self._recovery.put(message)
            case BeginShards():
                self._groups.begin_shards(message)
                self._messages.put((message, time.monotonic()))
            case End() if self._shard is None:
                return False
            case AnnounceSum() | SendState() | SaveShards() | RemoteTask() | End():
                self._messages.put((message, time.monotonic()))
            case _:
                return False
        return True

    def close(self, *, has_failed: bool) -> None:
        """End the thread and the groups."""
        self._messages.put(None)
        self._recovery.put(None)
        self._groups.end(has_failed=has_failed)
        self._thread.join(END_S)
        self._groups.break_off()
        self._thread.join()
        self._groups.close()

    # --- in a thread of its own ---------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while (received := self._messages.get()) is not None:
                message, at_s = received
                self._carry_out(message, at_s)
        except Closed:
            pass
        except Exception as error:
            self._fail(error)

    def _carry_out(self, message: Followed, at_s: float) -> None:
        match message:
            case FormGroup() if self._groups.is_first(message):
                self._begin(message)
            case BeginShards():
                self._begin_shards(message)
            case FormGroup(generation=generation) if generation > self._generation:
                if not self._join(message, agrees=self._shard is not None):
                    self._recover()
            case GroupBroken(generation) if generation >= self._generation:
                self._recover()
            case AnnounceSum():
                self._make_sum(message)
            case SendState() if self._shard is not None:
                self._connection.send(StateFollows())
            case SendState():
                assert self._states is not None
                self._connection.send(StateFollows())
                self._states.broadcast_state(self._server.state_dict(), root=1)
            case SaveShards(number):
                self._connection.send(ShardSaved(number, self._why_not_saved(number)))
            case End():
                self._start(message, self._parameters.version, at_s)
            case RemoteTask():
                keeps_for = self._made + 1 if message.progress.last == "used" else None
                version = self._parameters.begin_task(keeps_for=keeps_for)
                is_here = message.early == self._generation > 0
                self._parameters.begin_early(self._groups[message.early] if is_here else None)
                self._start(message, version, at_s)

    @property
    def _generation(self) -> int:
        return 0 if self._sums is None else self._sums.generation

    def _begin(self, form: FormGroup) -> None:
        """Begin with the state that the coordinator gives, or goes on with."""
        self._states = self._groups[form.generation]
        self._states.connect(self._transport, self._connection.local_host)
        first = self._states.broadcast_state(None)
        self._made = first["made"]
        self._parameters.begin(first["version"], first["server"])
        if first["server"] is None and self.step is not None:
            self._connection.send(self.step)  # rank 0 was lost, perhaps before it had this step

    def _begin_shards(self, begin: BeginShards) -> None:
        """Begin with the other ranks of this replica, at the version that this rank has or takes from another one."""
        assert self._shard is not None
        assert self._groups.of_replica is not None
        host = self._connection.local_host
        self._shard.group.connect(self._transport, self._groups.of_replica, host, begin.key)
        self._made = begin.made
        state = None
        if begin.loads and self._shard.saved is not None:
            names = [name for name, each in self._server.model.named_parameters() if each.requires_grad]
            state = self._shard.saved.read(begin.version, names)
        self._parameters.begin(begin.version, state)

    def _why_not_saved(self, version: int) -> str:
        """Save the shard of this rank; return why it cannot be saved, an empty text if it is."""
        assert self._shard is not None
        assert self._shard.saved is not None
        try:
            self._shard.saved.save(version, self._server.state_dict())
        except (OSError, RunError, UsageError) as error:
            return str(error)
        return ""

    def _make_sum(self, announced: AnnounceSum) -> None:
        """Sum the gradients that count, and make the update if it is due."""
        while self._made < announced.number:  # else another rank's state has brought them
            gradients = [self._moved.get((each.worker, each.draw), each) for each in announced.summed]
            self._summing = gradients
            self._is_early = announced.early == self._generation > 0
            if not gradients or self._can_sum(gradients):
                self._made = announced.number
                self._on_sum(gradients, announced)
        self._summing = ()

    def _can_sum(self, gradients: Sequence[SummedGradient]) -> bool:
        """Sum the gradients that count; return False after a recovery from the loss of a rank."""
        group = self._groups[self._generation]
        failure: ConnectionLost | None = None
        try:
            if any(each.at == LOST for each in gradients):
                raise ConnectionLost("a gradient was lost before a rank had its version")
            if self._is_early:
                self._parameters.await_early()
            else:
                self._parameters.write_terms(self._made + 1, gradients)
                group.wait(group.begin_sum(self._parameters.total))
        except ConnectionLost as error:
            self._parameters.renew_total()
            failure = error
        if self._shard is not None and not self._shard.group.agree(failure is None):
            failure = failure or ConnectionLost("a sum of another shard has failed")
        if failure is None:
            return True
        self._report(self._generation, failure)
        self._recover()
        return False

    def _on_sum(self, gradients: Sequence[SummedGradient], announced: AnnounceSum) -> None:
        if gradients:
            self._parameters.add_sum(announced.number, gradients, IndexBits(announced.missing), is_early=self._is_early)
        update = announced.made
        if update is None:
            self._parameters.keep_sum()
            return
        if update.is_skipped:
            self._parameters.drop_gradients(announced.number)
        set_step_options(self._server, announced.options)
        step = self._parameters.apply(update)
        if step is not None or self._parameters.not_finite:
            self.step = StepMade.of(update.version, step, self._parameters.not_finite)
            if self._sums is not None and self._sums.rank == 0:
                self._connection.send(self.step)

    # --- recovery -----------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take part in new groups, and compute again what is lost and counts, until the ranks go on."""
        while True:
            match self._recovery.get():
                case FormGroup() as form:
                    self._join(form, agrees=True)
                case RecomputeGradient() as lost:
                    self._recompute(lost)
                case ResumeSums(generation) as resumed if generation == self._generation:
                    self._moved = {(each.worker, each.draw): each for each in resumed.decoded}
                    return
                case None:
                    raise Closed

    def _join(self, form: FormGroup, *, agrees: bool = False) -> bool:
        """Sum in a new group from now on; return False, and tell the coordinator, if a member of it is lost.

        Args:
            form: the group.
            agrees: whether its members may have made other sums, so that some take the state of another one.
        """
        group = self._groups[form.generation]
        try:
            group.connect(self._transport, self._connection.local_host)
            if agrees:
                self._agree(group, form)
        except ConnectionLost as error:
            self._report(form.generation, error)
            return False
        self._sums = form
        self._groups.close_before(form.generation)
        return True

    def _agree(self, group: ElasticGroup, form: FormGroup) -> None:
        """Bring all ranks of a new group to the newest sum that one of them has made."""
        rows, pending = group.begin_gather(torch.tensor([self._made]).view(torch.uint8))
        group.wait(pending)
        made = rows.view(torch.int64).flatten().tolist()
        newest = max(made)
        first = made.index(newest)
        if min(made) < newest:
            own = {"server": self._server.state_dict(), "version": self._parameters.number}
            state = group.broadcast_state(own if form.rank == first else None, first)
            if self._made < newest:
                self._parameters.drop_terms(newest, self._summing)
                self._parameters.take_state(state["version"], state["server"])
                self._made = newest
        if form.rank == first and self.step is not None:  # the rank that had to send it may be the lost one
            self._connection.send(self.step)
        if form.rank == 0:
            self._connection.send(SumsMade(form.generation, newest))

    def _recompute(self, lost: RecomputeGradient) -> None:
        """Let the worker of this rank compute the gradient of a lost one."""

        def finish(is_here: bool) -> None:
            if is_here:
                self._parameters.hold_recomputed(lost.number, lost.worker, lost.draw, lost.weight)
            self._connection.send(GradientRecomputed(lost.worker, lost.draw, is_here))

        again = Recomputation(lost, self._parameters.recomputed, finish)
        self._start(again, self._parameters.version, time.monotonic())

    def _report(self, generation: int, error: ConnectionLost) -> None:
        self._connection.send(GroupBroken(generation, str(error), isinstance(error, Unreachable)))
