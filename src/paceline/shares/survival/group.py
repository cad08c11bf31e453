"""Process group that lives through the loss of ranks: a gloo group of the living inside, made anew after each loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed

from paceline.errors import RunError
from paceline.shares.refusals import refuse
from paceline.shares.survival.agreement import Agreement, PlaceReport, agree
from paceline.shares.survival.ended_ranks import EndedRanks
from paceline.shares.survival.living_group import LivingGroup, Operation
from paceline.shares.survival.own_process_group import (
    OwnProcessGroup,
    Tensors,
    collective_of,
    copy,
    finished,
    flat,
    take_own,
    untraced,
)
from paceline.shares.survival.own_replica import OwnReplica
from paceline.shares.survival.roll import BACK, FAILED, LOST, Event, Roll
from paceline.shares.survival.roll_call import InterruptedMeetingError, RollCall
from paceline.shares.texts import refusal_of_ends

dist: Any = torch.distributed
APART = "this rank has come to another place than the others, or has made other steps, or draws other samples"
SILENT = "this rank was silent for so long that the others have gone on without it"
OF_ALL, BETWEEN_TWO = "_of_all", "_between_two"  # methods of collectives that need all ranks, or two of them


class LateError(Exception):
    """Place in the script at which a rank comes back, and which the others have passed."""


class Training(Protocol):
    """What a group asks of the training that it belongs to."""

    def report(self, report: PlaceReport) -> PlaceReport:
        """Return the report with what the training knows."""

    def state(self) -> dict[str, Any]:
        """Return the state after the last step, of this rank's shard of the model."""

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of another rank after a step that this one lacks."""

    def regroup(self, agreed: Agreement) -> None:
        """Go on as agreed, with other ranks than before."""

    def give_up(self, reason: str) -> None:
        """Let the next loss be one of all ranks."""

    def reset_reducers(self) -> None:
        """Let the next backward pass begin as if there was none before."""


@untraced
class SurvivingGroup(OwnProcessGroup):
    """Process group of all ranks, some of which may be lost.

    Sums within a backward pass never fail: an error is kept until the pass has ended, as torch's reducer does not
    survive one. Then, and in other collectives, the living agree on how they go on (`agree`). Reductions and broadcasts
    are among the living; other collectives need all ranks.

    Where FSDP shards each replica of the model over several ranks, a backward pass sums among the peers that hold the
    same shard. All ranks of a replica have its sums, or none steps: they vote on it.

    Args:
        calls: roll call of the ranks.
        training: training of this rank.
        replica: replica of this rank.
        is_alone: whether this rank comes back: until it is where the others are, its collectives give its own values.

    Attributes:
        is_alone: the same, now.
        takes_any_root: whether a broadcast may begin at any rank that lives, if its own root does not.
        is_in_backward: whether a backward pass is under way.
        position: units that this rank has passed.
        voids: units that were given up.
    """

    def __init__(
        self,
        calls: RollCall,
        rank: int,
        ranks: int,
        training: Training,
        *,
        replica: OwnReplica,
        is_alone: bool,
    ) -> None:
        super().__init__(rank, ranks)
        self._calls = calls
        self._replica = replica
        self._training = training
        self.is_alone = is_alone
        self.takes_any_root = False
        self._due: int | None = None  # position at which a rank comes back
        self._is_called = False  # whether the replica goes on with other ranks after the step
        self.is_in_backward = False
        self._sums: list[Operation] | None = None  # of a backward pass; None before the first one
        self._bucket_count = 0  # sums of the last backward pass that was whole
        self._failed: set[int] = set()  # units that some rank has not computed
        self._kept: list[torch.Tensor] = []  # result of the last collective, for a rank that lacks it
        self._ended = EndedRanks()
        self.position = 0
        self.voids: set[int] = set()
        self._inner = LivingGroup(calls, rank, is_alone=is_alone)
        calls.watch(self._on_event, self._look)

    @property
    def living(self) -> tuple[int, ...]:
        """Numbers of the living ranks."""
        return self._inner.members

    @property
    def missing(self) -> list[int]:
        """Ranks that are lost."""
        return [rank for rank in range(self.size()) if rank not in self.living]

    # --- sums of a backward pass --------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin a backward pass, of which the sums are one unit."""
        self.is_in_backward = True
        self._sums = None

    def end_backward(self) -> bool:
        """End a backward pass, and return whether this rank has its sums."""
        sums, self._sums = self._sums, None
        self.is_in_backward = False
        if sums is None:
            return True
        is_void = self.position in self.voids or self.is_alone
        # All ranks of a replica go on with others after the same step: within it, one would wait for another.
        is_due = self._is_due(self.position + 1)
        is_whole, is_quiet = self._replica.all_have(all(each.is_whole for each in sums), not is_due)
        self._is_called = not is_quiet
        if is_whole:
            self._kept = []
            self._bucket_count = len(sums)
        else:
            self._agree(is_sum=True)
        self._pass()
        return is_whole and not is_void

    @property
    def can_fail(self) -> bool:
        """Whether the other ranks still wait for sums of the backward pass under way, which may end without it."""
        return not self.is_alone and not self._replica.is_several and len(self._sums or []) < self._bucket_count

    def fail_backward(self) -> None:
        """End a backward pass that this rank cannot compute, and give its sums up on all ranks."""
        self._inner.generation = self._calls.tell(Event(FAILED, self.rank(), self.position))
        self._agree(is_sum=True)
        self._sums = None
        self.is_in_backward = False
        self._pass()

    def _pass(self) -> None:
        """Go on after a backward pass, of which the buckets of all ranks are built anew if one has failed."""
        if self.position in self._failed:
            self._training.reset_reducers()
        self.position += 1

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce tensors over the living."""
        opts = opts or dist.AllreduceOptions()
        if self.is_in_backward:
            return self.sum_of_backward(tensors, opts)
        return self._collective(lambda inner: inner.allreduce(tensors, opts), tensors)

    def sum_of_backward(self, tensors: Tensors, opts: Any, *, among_peers: bool = False) -> Any:
        """Reduce tensors of a backward pass over the living, or over those with the same shard as this rank."""
        self._sums = self._sums or []
        if self.position in self.voids or self.is_alone:
            return finished(tensors)
        operation = self._inner.start(lambda inner: inner.allreduce(tensors, opts), tensors, among_peers=among_peers)
        self._ended.awaited = operation
        self._sums.append(operation)
        return operation.work

    # --- other collectives --------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """Copy the tensors of a rank to the living."""

        def run(inner: Any) -> Any:
            if opts.rootRank in self.missing and not self.takes_any_root:
                self.refuse("broadcast")
            given = dist.BroadcastOptions()
            given.rootRank = self.living.index(opts.rootRank) if opts.rootRank in self.living else 0
            return inner.broadcast(tensors, given)

        return self._collective(run, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """Reduce tensors over the living, for one rank."""
        given = dist.AllreduceOptions()
        given.reduceOp = opts.reduceOp
        sums = [each.clone() for each in tensors]
        self._collective(lambda inner: inner.allreduce(sums, given), sums)
        if opts.rootRank == self.rank():
            copy(sums, tensors)
        return finished(tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for the living."""
        token = torch.zeros(1, device="cpu")
        self._collective(lambda inner: inner.allreduce([token]), [token])
        return finished([token])

    allgather = collective_of("allgather", OF_ALL)
    _allgather_base = all_gather_single = collective_of("_allgather_base", OF_ALL)
    gather = collective_of("gather", OF_ALL)
    scatter = collective_of("scatter", OF_ALL)
    reduce_scatter = collective_of("reduce_scatter", OF_ALL)
    _reduce_scatter_base = collective_of("_reduce_scatter_base", OF_ALL)
    alltoall = collective_of("alltoall", OF_ALL)
    alltoall_base = all_to_all_single = collective_of("alltoall_base", OF_ALL)

    send = collective_of("send", BETWEEN_TWO)
    recv = collective_of("recv", BETWEEN_TWO)

    def after_step(self) -> None:
        """Go on with other ranks after a step, if some have been lost or come back by now."""
        if self._is_called if self._replica.is_several else self._is_due(self.position):
            self._agree(is_sum=False)

    def _is_due(self, position: int) -> bool:
        """Return whether ranks have been lost, or come back at this position or before it."""
        return self._inner.is_broken or (self._due is not None and position >= self._due)

    def come_back(self) -> bool:
        """Take part again, as soon as the others are where this rank is; return whether they had not passed it."""
        self._inner.generation = self._tell(BACK)
        try:
            self._agree(is_sum=False)
        except LateError:
            self._inner.be_alone(self._tell(LOST))
        else:
            self.is_alone = False
        return not self.is_alone

    def _tell(self, what: str) -> int:
        """Tell the others what all ranks of the replica do, and return the number of the event."""
        [number] = self._replica.told_by_first(lambda: [self._calls.tell(Event(what, self.rank(), self.position))])
        return int(number)

    def finish(self, *, has_failed: bool) -> None:
        """Wait for the end of the living, some of which may lack what this rank has, unless the script has failed."""
        if self.is_alone and not has_failed:
            self._calls.await_end()
        while not self.is_alone and not has_failed:
            try:
                self._calls.part(Roll(self._inner.generation, self.living))
                break
            except InterruptedMeetingError:
                self._agree(is_sum=False)
        self._inner.close()

    def exchange(self, row: torch.Tensor) -> Operation:
        """Begin to gather a row of each living rank. It is no unit: a rank goes on without the rows."""
        rows = [torch.empty_like(row) for _ in self.living]
        return self._inner.start(lambda inner: inner.allgather([rows], [row]), rows)

    # --- what is inside -----------------------------------------------------------------------------------

    def _of_all(self, name: str, *args: Any) -> Any:
        if self.is_alone:
            take_own(list(flat(args[0])), list(flat(args[1])), self.rank(), self.size())
        return self._collective(lambda inner: getattr(inner, name)(*args), list(flat(args[0])), name)

    def _between_two(self, name: str, *args: Any) -> Any:
        self._training.give_up(f"{name} is between two ranks")
        operation = self._inner.start(lambda inner: getattr(inner, name)(*args), list(flat(args[0])))
        return operation.work

    def _collective(self, run: Callable[[Any], Any], tensors: Tensors, of_all: str = "") -> Any:
        """Carry out an operation, and begin it again with the living when a rank is lost."""
        if self.is_alone:
            self.position += 1
            return finished(tensors)
        before = [each.clone() for each in tensors]  # an operation that fails leaves them half changed
        while True:
            if of_all and self.missing:
                self.refuse(of_all)
            self._ended.awaited = operation = self._inner.start(run, tensors)
            operation.future.wait()
            if all(self._replica.all_have(operation.is_whole)):
                break
            copy(before, tensors)
            result = self._agree(is_sum=False)
            if result is not None and not of_all:
                copy(result, tensors)
                break
        self._kept = [each.clone() for each in tensors]
        self.position += 1
        return finished(tensors)

    def _on_event(self, generation: int, event: Event) -> None:
        """Give the group inside up when a rank is lost; go on to the place at which one comes back, if it is ahead."""
        if event.what == BACK and event.position > self.position:
            self._due = event.position
            if event.position > self.position:  # else the script has come there meanwhile
                return
        if event.what == FAILED:
            self._failed.add(event.position)
        self._inner.break_before(generation)

    def _look(self) -> None:
        """Give the group inside up if this rank waits for ranks that have come to the end of the script."""
        if self._ended.look(lambda: self._calls.ended_among(self.living)):
            self._inner.break_off()

    def refuse(self, name: str) -> NoReturn:
        """Raise the error of a collective that needs all ranks, which are started again then."""
        lost = ", ".join(map(str, self.missing))
        self._training.give_up(f"{name} needs all ranks")
        raise RunError(f"{name} needs all ranks, and rank {lost} is lost: all ranks are started again")

    def _agree(self, *, is_sum: bool) -> list[torch.Tensor] | None:
        """Go on with the living; return the result of the collective at which this rank stands, if another has it."""
        if self._ended.found:
            refuse(refusal_of_ends(self._ended.found))
        self._inner.break_off()
        while True:
            roll = self._inner.next_roll()
            if self.rank() not in roll.living:  # if alone, the first rank of its replica has told that they are late
                raise LateError if self.is_alone else RunError(SILENT)
            report = PlaceReport(self.position, tuple(sorted(self.voids)), is_sum=is_sum, is_new=self.is_alone)
            try:
                reports = self._calls.meet(roll, self._training.report(report))
                self._inner.enter(roll)
                agreed = agree(reports)
                state, result = self._inner.hand_over(agreed, self._training.state, self._kept)
            except InterruptedMeetingError:
                continue
            return self._go_on(agreed, state, result)

    def _go_on(self, agreed: Agreement, state: Any, result: Any) -> list[torch.Tensor] | None:
        if self.rank() in agreed.late:
            raise LateError
        if self.rank() in agreed.apart:
            raise RunError(APART)
        self.voids = set(agreed.voids)
        self._due = None
        self._is_called = False
        if self.rank() in agreed.given:
            self._training.load(state)
        self._training.regroup(agreed)
        return result if self.rank() in agreed.told else None
