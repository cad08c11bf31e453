"""Training of a rank that survives the loss of others: which steps count, and what a rank gets that lacks one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import cached_property
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._compile import _disable_dynamo

from paceline.clusters.launch_env import SILENCE, SURVIVES, UNFIT
from paceline.policies.estimators.timeouts.round_trip_timeout import RoundTripTimeout
from paceline.shares.handed_out import Loader
from paceline.shares.survival.agreement import Agreement, PlaceReport
from paceline.shares.survival.catch_up import CatchUp
from paceline.shares.survival.group import SurvivingGroup
from paceline.shares.survival.ledger import BatchLedger, NumberedBatch
from paceline.shares.survival.recording_rank import RecordingRank
from paceline.shares.survival.rejoining import RETURNING, takes_turn
from paceline.shares.survival.roll_call import RollCall, as_tuples
from paceline.shares.survival.surviving_groups import SurvivingGroups
from paceline.shares.survival.training_state import TrainingState
from paceline.utils.wording import counted

AGREED, PROGRESS = "paceline/agreed", "paceline/progress"  # in the launcher's store
HAVE_ENDED = -1.0  # in the place of a time
TURN_S = 0.1  # between two looks whether another rank has come back
LEAST_UPDATES = 3  # before it is known how a script trains


class StepVerdict(Enum):
    """What becomes of a step of the script."""

    USED = auto()
    GIVEN = auto()  # another rank has made it, and its state is here
    IN_VAIN = auto()  # its batches are computed again


class SurvivingTraining:
    """Training of one rank that goes on when others are lost.

    Args:
        connect: function that returns a new client of the launcher's store.
        rank: number of this rank.
        ranks: number of ranks.
        is_one_host: whether all ranks are on one host.
        launch: name that all starts of this rank by one launcher share.

    Attributes:
        groups: process groups of this rank.
        on_regroup: functions that are called when the living ranks have changed.
    """

    def __init__(
        self, connect: Callable[[], Any], rank: int, ranks: int, *, is_one_host: bool = True, launch: str = ""
    ) -> None:
        self.groups = SurvivingGroups(connect, rank, ranks, self, is_one_host=is_one_host, launch=launch)
        self._rank = rank
        self._ranks = ranks
        self.on_regroup: list[Callable[[], object]] = []
        self._ledgers: WeakKeyDictionary[Loader, BatchLedger] = WeakKeyDictionary()
        self._ledger = BatchLedger()  # of the loader with training batches
        self._state = TrainingState()
        self._step = StepVerdict.USED  # the last one
        self._is_open = False  # whether there was a backward pass since
        self._is_given = False
        self._stepped = -1
        self._updates = 0
        self._timeout = RoundTripTimeout()
        self._catch_up = CatchUp()
        self._is_fit = True
        self._epoch: Any = None

    @property
    def group(self) -> SurvivingGroup | None:
        """Process group of all ranks, from the first model on."""
        return self.groups.whole

    @property
    def _calls(self) -> RollCall:
        return self.groups.calls

    @property
    def is_alone(self) -> bool:
        """Whether this rank comes back, and is not where the others are yet."""
        return self.group is not None and self.group.is_alone

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that live."""
        return self.group.living if self.group is not None else tuple(range(self._ranks))

    @cached_property
    def recording_rank(self) -> RecordingRank:
        """Choice of the rank that writes the record of the run."""
        return RecordingRank(self._calls.store, self._rank)

    # --- what the patches tell ----------------------------------------------------------------------------

    def before_model(self, module: torch.nn.Module, group: Any) -> None:
        """Let a model, and the script's own collectives, use a group that lives on.

        Args:
            module: what DDP wraps.
            group: process group that the script gives to DDP; None for the default one.
        """
        if self._is_fit and (reason := self.groups.begin_with_model(module, group)):
            self.give_up(reason)

    def before_sharding(self, mesh: Any) -> None:
        """Let FSDP, which shards a module over a mesh, use groups that live on, if other ranks have the same shards.

        Args:
            mesh: what FSDP knows of the mesh, and of its groups.
        """
        if self._is_fit and (reason := self.groups.begin_with_shards(mesh)):
            self.give_up(reason)

    @contextmanager
    def taking_any_root(self) -> Iterator[None]:
        """Let broadcasts of DDP itself begin at a rank that lives."""
        if self.group is not None:
            self.group.takes_any_root = True
        try:
            yield
        finally:
            if self.group is not None:
                self.group.takes_any_root = False

    def add_model(self, model: torch.nn.Module) -> None:
        """Add a model whose state a rank gets that lacks a step."""
        self._state.models.append(model)

    def give_up(self, reason: str) -> None:
        """Let the next loss be one of all ranks."""
        if self._is_fit:
            self._is_fit = False
            self._calls.store.set(UNFIT, reason)
            if self._rank == 0:
                print(f"paceline: a lost rank starts all ranks again, because {reason}", file=sys.stderr, flush=True)

    def ledger_of(self, loader: Loader) -> BatchLedger:
        """Return the ledger of a loader."""
        return self._ledgers.setdefault(loader, BatchLedger())

    def compute(self, loader: Loader | None, batch: NumberedBatch | None) -> None:
        """Note that a backward pass begins that computes a batch."""
        if self.group is None:
            return
        if loader is None or batch is None:
            self.give_up("the script makes its batches itself")
            return
        ledger = self.ledger_of(loader)
        if self._updates and ledger is not self._ledger:
            self.give_up("it trains on several loaders")
        if ledger is not self._ledger or batch.epoch != self._epoch:
            self._ledger = ledger
            self._epoch = batch.epoch
            self._begin_epoch(self.group, batch)
        if not ledger.compute(batch):
            self.give_up("it computes a batch for several steps")
        self._is_open = True

    def begin_backward(self) -> None:
        """Begin the sums of a backward pass."""
        if self.group is not None:
            self.group.begin_backward()

    def end_backward(self) -> bool:
        """End the sums of a backward pass, and return whether this rank has them."""
        return self.group is None or self.group.end_backward()

    def took(self, seconds: Sequence[float]) -> None:
        """Note the seconds of each rank in an update, from which the launcher knows how long a rank may be silent."""
        if self._rank == self.living[0]:
            has_changed = [self._timeout.observe(rank, each) for rank, each in enumerate(seconds) if each]
            if any(has_changed):
                longest_s = max(self._timeout.of(rank) for rank in self.living)
                self._calls.store.set(SILENCE, str(longest_s))

    def fails_backward(self) -> bool:
        """Return whether all ranks have given up the backward pass under way, which this rank cannot compute."""
        if self.group is None or not self._is_fit or not self.group.can_fail:
            return False
        self.group.fail_backward()
        return True

    def _begin_epoch(self, group: SurvivingGroup, batch: NumberedBatch) -> None:
        """Note where an epoch begins; a rank that comes back, perhaps from a checkpoint, is then there too."""
        key = f"paceline/epoch/{batch.epoch}"
        if group.is_alone:
            if self._calls.store.check([key]):
                number, group.position, self._updates = json.loads(self._calls.store.get(key))
                self._ledger.shift(number - batch.number)
        elif group.rank() == self.living[0] and batch.epoch is not None:
            self._calls.store.set(key, json.dumps([self._ledger.number(batch), group.position, self._updates]))

    @_disable_dynamo
    def takes_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer is to make its step."""
        if not any(each is optimizer for each in self._state.optimizers):
            self._state.optimizers.append(optimizer)
        return self._end_update() is StepVerdict.USED

    def takes_update(self, scaler: Any) -> bool:
        """Return whether a GradScaler is to update its scale."""
        if not any(each is scaler for each in self._state.scalers):
            self._state.scalers.append(scaler)
        return self._end_update() is StepVerdict.USED

    @property
    def scales(self) -> bool:
        """Whether the script has a GradScaler."""
        return bool(self._state.scalers)

    @property
    def advances(self) -> bool:
        """Whether schedules are to advance: not after a step in vain."""
        return self._step is not StepVerdict.IN_VAIN

    def _end_update(self) -> StepVerdict:
        if self.group is None:
            return StepVerdict.USED
        if not self._is_open:
            return self._step
        if self.group.is_alone:
            self._read_agreed()
        is_in_vain = not self._is_given and self._ledger.is_in_vain
        is_given = self._is_given or self.group.is_alone
        self._step = StepVerdict.IN_VAIN if is_in_vain else StepVerdict.GIVEN if is_given else StepVerdict.USED
        self._is_open = self._is_given = False
        self._ledger.end_update(is_used=not is_in_vain)
        if not is_in_vain:
            self._stepped = self.group.position - 1
            self._updates += 1
            if self._updates == LEAST_UPDATES and self._is_fit:
                self._calls.store.set(SURVIVES, "1")
        return self._step

    @_disable_dynamo
    def after_step(self, *, is_last: bool) -> None:
        """Let ranks leave and return after a step: after the last of its parts, as the update of a GradScaler."""
        if self.group is None or not is_last:
            return
        if self.group.is_alone:
            self._return_to(self.group)
        else:
            self.group.after_step()
        if not self.group.is_alone and len(self.living) < self._ranks and self._rank == self.living[0]:
            self._calls.store.set(PROGRESS, json.dumps([self._ledger.handed_out, self.group.position]))

    def _return_to(self, group: SurvivingGroup) -> None:
        """Take part again, as soon as this rank is so far ahead that the others know in time where it waits."""
        wait_s = inf
        while wait_s:
            wait_s, position = self.groups.replica.told_by_first(lambda: self._look(group.position))
            if wait_s == HAVE_ENDED:
                self.groups.check_others()
            group.position = int(position)
            if wait_s == inf:
                return
            time.sleep(wait_s)
        if not group.come_back():
            self._catch_up.was_passed()
            return
        self._step = StepVerdict.USED
        self._is_given = False

    def _look(self, position: int) -> tuple[float, int]:
        """Return how long to wait before the next look, 0 to take part now, and inf to go on; and the right position.

        Args:
            position: units that this rank has passed, as far as it knows.
        """
        store = self._calls.store
        if self._calls.others_have_ended():
            return HAVE_ENDED, position
        progress = store.get(PROGRESS) if store.check([PROGRESS]) else b""
        if not progress:
            return inf, position
        wait_s, position = self._catch_up.look(
            time.monotonic(), self._ledger.handed_out, position, json.loads(progress)
        )
        if wait_s == 0 and not takes_turn(store, self._rank):
            wait_s = TURN_S
        return inf if wait_s is None else wait_s, position

    def _read_agreed(self) -> None:
        """Read what the living have agreed on while this rank was not there."""
        if self._calls.store.check([AGREED]):
            in_vain, dropped = as_tuples(json.loads(self._calls.store.get(AGREED)))
            self._ledger.in_vain = in_vain
            self._ledger.dropped = dropped

    def await_cause(self) -> None:
        """Wait a moment for the loss of a rank without which this one cannot compute, since its script has failed."""
        self.groups.replica.await_loss()

    # --- what the group asks ------------------------------------------------------------------------------

    def report(self, report: PlaceReport) -> PlaceReport:
        """Return the report with what the training knows."""
        ledger = self._ledger
        return report._replace(
            stepped=self._stepped,
            undone=ledger.undone,
            handed_out=ledger.handed_out,
            dealt=ledger.dealt,
            dropped=ledger.dropped,
            updates=self._updates,
            checksum=ledger.checksum,
            rates=tuple(float(group["lr"]) for each in self._state.optimizers for group in each.param_groups),
        )

    def state(self) -> dict[str, Any]:
        """Return the state after the last step."""
        return self._state.content()

    def load(self, state: dict[str, Any]) -> None:
        """Take over the state of another rank after a step that this one lacks."""
        self._state.load(state)
        self._is_given = True

    def reset_reducers(self) -> None:
        """Let the next backward pass begin as if there was none before."""
        self._state.reset_reducers()

    def regroup(self, agreed: Agreement) -> None:
        """Go on as agreed, with other ranks than before."""
        self._ledger.give_up(agreed.in_vain, agreed.dropped)
        for function in self.on_regroup:
            function()
        if self._rank == self.living[0]:
            self._calls.store.set(AGREED, json.dumps([self._ledger.in_vain, self._ledger.dropped]))
            self._calls.store.set(PROGRESS, "")  # not that of an earlier loss; a rank may be about to read the key
            self._calls.store.delete_key(RETURNING)
            print_living(self.living)


def print_living(ranks: Sequence[int]) -> None:
    """Print which ranks go on."""
    goes = "goes" if len(ranks) == 1 else "go"
    there = ", ".join(map(str, ranks))
    print(f"paceline: {counted(len(ranks), 'rank')} {goes} on: {there}", file=sys.stderr, flush=True)
