"""Balancer of one rank: which shares its loaders cut by, what its backward passes weigh, and when shares change."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from paceline.errors import UsageError
from paceline.policies.share_exchanges import updates_at_once
from paceline.policies.shares import Pieces
from paceline.recording.script_runs import SCRIPT
from paceline.shares.batches import Dealt, divided, numbered
from paceline.shares.costs import CostOf, cost_function, how_known
from paceline.shares.division import Division, own_batch
from paceline.shares.handed_out import HandedOut, HandedOutBatches, Loader
from paceline.shares.rank_batches import Batch
from paceline.shares.rank_limits import RankLimits, WorkLimit, memory_of
from paceline.shares.rank_times import RankTimes
from paceline.shares.refusals import outcome_of
from paceline.shares.run_record import RunRecord
from paceline.shares.same_parameters import SameParameters
from paceline.shares.settings import BalanceSettings
from paceline.shares.stopwatch import HostClock, Stopwatch, StreamClock
from paceline.shares.survival.surviving_training import SurvivingTraining
from paceline.shares.survival.times import SurvivingTimes
from paceline.shares.texts import (
    hint_of_memory,
    hint_of_size,
    name_of_loader,
    name_of_model,
    note_on_layers,
    refusal_of_gather,
    refusal_of_loader,
    refusal_of_repetition,
    start_line,
    text_of_fall,
    unused_line,
)
from paceline.shares.timed_batches import TimedBatches, check_marks, seconds_of_updates
from paceline.shares.training_loaders import TrainingLoaders
from paceline.shares.weighing import Weighing


class Balancer:
    """Unequal shares of the global batch in one rank, from the first model on.

    The shares of an update are decided on each rank from the same gathered times, at the same place of the script, so
    all ranks decide the same without a message.

    Args:
        settings: settings of the shares.
        model: first model that is taken over.
        device: device on which it computes.
        survival: survival of this rank, where others may be lost; None where they may not.

    Attributes:
        model: name of that model, for messages.
        ranks: number of ranks.
        rank: number of this rank.
        stopwatch: stopwatch of this rank.
        batches: batches that loaders have handed out.
        record: record of the run; None before the first backward pass, and on other ranks than rank 0 unless ranks may
            be lost.
    """

    def __init__(
        self,
        settings: BalanceSettings,
        model: torch.nn.Module,
        device: torch.device,
        survival: SurvivingTraining | None = None,
    ) -> None:
        self._settings = settings
        self.model = name_of_model(model)
        self._parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
        self._note = note_on_layers(model)
        self.ranks = dist.get_world_size()
        self.rank = dist.get_rank()
        is_host = device.type == "cpu"
        self._memory = memory_of(device)
        self.stopwatch = Stopwatch(HostClock() if is_host else StreamClock(device))
        self.record: RunRecord | None = None
        self._survival = survival
        group = survival.group if survival is not None else None
        self._times = SurvivingTimes(self.ranks, group) if group is not None else RankTimes(self.ranks)
        if survival is not None:
            survival.on_regroup.append(self._begin_anew)
        self._same = SameParameters(model, is_host=is_host)
        self._weighing = Weighing(settings.weigh, self._times, is_read_always=is_host)
        self._loaders = TrainingLoaders()
        self.batches = HandedOutBatches(self.rank, self._loaders.trains)
        self._division: Division | None = None
        self._has_changed = False  # whether an update was divided unequally
        self._dealt: list[Dealt] = []  # in the update under way
        self._ahead = 0  # batches that the script has taken ahead of it
        self._measured: list[TimedBatches] = []  # of which the times are not exchanged yet
        self._late = 0 if is_host else 1  # updates for which a device is given time before its events are read
        self._exchanged: list[TimedBatches] = []
        self._at_once = 1  # updates of an exchange
        self._known_sizes: set[int] = set()

    def share(self, batch_size: int) -> int:
        """Return the samples of the next batch, which the script makes itself."""
        shares = [batch_size] * self.ranks if self._division is None else self._division.scaled(batch_size)
        dealt = divided(shares, batch_size)
        self.batches.add(HandedOut(None, dealt))
        return dealt.samples[self.rank]

    def deal(self, loader: Loader, batches: Sequence[Batch]) -> tuple[Batch, Dealt]:
        """Return this rank's batch of an update that a loader asks for now, and how the update is divided."""
        if self._division is None:
            own, dealt = own_batch(batches, self.rank)
        else:
            own, dealt = self._division.divide(loader, batches, self._loaders.batch_size(loader))
        if self._survival is not None:
            dealt = numbered(dealt, batches, loader.batch_sampler, self._survival.ledger_of(loader))
        return own, dealt

    def owed_batch(self, loader: Loader | None) -> Any:
        """Return a batch of a loader that has ended, if one is owed since a rank was lost; else None."""
        if loader is None:
            return None
        owed = self._survival.ledger_of(loader).take_owed() if self._survival is not None else None
        if owed is None:
            self.batches.loader_ended(loader)
            return None
        own, dealt = self.deal(loader, owed)
        self.handed_out(loader, dealt)
        # The loader has ended, so this process loads the samples itself.
        return _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, False).fetch(own)

    def handed_out(self, loader: Loader | None, dealt: Dealt | None, *, is_by_thread: bool = False) -> bool:
        """Note the batch that a loader has just returned; return whether the script is to get it.

        Args:
            loader: loader; None for one that is gone.
            dealt: how the samples of the update were divided; None if they were not.
            is_by_thread: whether a thread has taken it that does not compute.
        """
        batch = dealt.batch if dealt is not None else None
        ledger = self._survival.ledger_of(loader) if self._survival is not None and loader is not None else None
        if ledger is not None and batch is not None and not ledger.hand_out(batch):
            return False
        if is_by_thread or torch.is_grad_enabled():  # else it is for evaluation
            self.batches.add(HandedOut(loader, dealt, is_by_thread))
            if loader is not None and dealt is not None:
                self._loaders.handed_out(loader, dealt.size)
        return True

    def forward_began(self, shapes: Sequence[Sequence[int]]) -> None:
        """Note a forward pass with gradients, which reads tensors of these shapes."""
        self.batches.forward_began(shapes)
        self.stopwatch.start()

    def weight_of(self, loss: torch.Tensor) -> float:
        """Return the factor of the backward pass that begins.

        Raises:
            UsageError: the batch was not dealt by rank, or the loss cannot be weighed.
        """
        loader, dealt, _ = self.batches.backward_began()
        if dealt is None:
            raise UsageError(refusal_of_loader(loader, self.ranks))
        if self._has_changed and self.batches.is_repeated:
            raise UsageError(refusal_of_repetition(loader))
        self._loaders.backward_began(loader, dealt.size)
        if self._division is None:
            self._begin(loss, dealt.samples[self.rank], loader)
        if self._survival is not None:  # after what only the first update has: a rank may come back in a later epoch
            self._survival.compute(loader, dealt.batch)
        if not self._dealt or self._dealt[-1] is not dealt:
            self._dealt.append(dealt)
        self._ahead = self.batches.ahead
        self._has_changed |= len(set(dealt.samples)) > 1
        return self._weighing.weight_of(loss, dealt.samples[self.rank], dealt.weight(self.rank))

    def sums_ended(self) -> None:
        """Exchange times, after a backward pass whose sums have ended, and decide by those of the exchange before."""
        if not self._dealt or self._division is None:
            return
        now_s = time.perf_counter()
        rows = self._times.end()
        if rows is not None:
            self._decide(self._division, rows, now_s)
        sizes = {dealt.samples[self.rank] for dealt in self._dealt}
        is_first = not sizes <= self._known_sizes
        batches = TimedBatches(
            dealt=self._dealt,
            spans=self.stopwatch.take(),
            ended_s=now_s,
            is_first=is_first,
            divisor=self._weighing.divisor,
            ahead=self._ahead,
        )
        self._measured.append(batches)
        self._known_sizes |= sizes
        self._dealt = []
        limits = self._limits.update_ended(max(self._known_sizes), is_first=is_first)
        most_work = self._work_limit.update_ended(max(dealt.work[self.rank] for dealt in batches.dealt))
        if len(self._measured) == self._at_once + self._late and not self._exchanged:
            self._exchanged, self._measured = self._measured[: self._at_once], self._measured[self._at_once :]
            own_s = [0.0 if each.is_first else self.stopwatch.seconds(each.spans) for each in self._exchanged]
            checked = [*(each.divisor for each in self._exchanged), *(each.mark for each in self._exchanged)]
            self._times.begin([*own_s, *checked, *limits, most_work, self._same.checksum()])

    def _decide(self, division: Division, rows: list[list[float]], now_s: float) -> None:
        """Decide by the times of the ranks that were exchanged last."""
        policy = division.policy
        exchanged, self._exchanged = self._exchanged, []
        columns, count = list(zip(*rows, strict=True)), len(exchanged)
        seconds = seconds_of_updates(columns, count)
        for divisors in columns[count : 2 * count]:
            self._weighing.check(divisors)
        check_marks(columns[2 * count : 3 * count])
        for each, of_ranks in zip(exchanged, seconds, strict=True):
            self._keep(each, of_ranks)
            if self._survival is not None:
                self._survival.took(of_ranks)
        for each, of_ranks in zip(exchanged[:-1], seconds, strict=False):
            policy.add(each.work, of_ranks)
        limits = self._limits.of_ranks([row[3 * count : -2] for row in rows])
        if limits != policy.limits and self.record is not None:
            self.record.limited(now_s, limits)
        policy.limits = limits
        division.most_work = list(columns[-2])
        self._same.check(columns[-1], has_changed=self._has_changed)
        decision = policy.decide(exchanged[-1].work, seconds[-1])
        if decision is not None and self.record is not None:
            self.record.decided(now_s, decision)
        self._at_once = updates_at_once(seconds)  # an exchange costs as much processor time as a fast update

    def hint(self, error: BaseException) -> str:
        """Return what to look at if the script fails now, because its batch has another size; empty if it has not."""
        dealt = self.batches.latest.dealt
        if dealt is None or dealt.samples[self.rank] == dealt.size:
            return ""
        hint_of = hint_of_memory if isinstance(error, torch.cuda.OutOfMemoryError) else hint_of_size
        return hint_of(dealt.samples[self.rank], dealt.size)

    def has_run_out_of_memory(self) -> bool:
        """Note that a backward pass has run out of memory; return whether a smaller share may have enough."""
        dealt = self._dealt[-1]
        samples = dealt.samples[self.rank]
        if self._division is None or dealt.size != self._division.sizes.batch_size:
            return False
        work, equal_work = dealt.work[self.rank], max(dealt.equal_work)
        if not (
            self._work_limit.fall(work, equal_work) if self._is_by_cost else self._limits.fall(samples, equal_work)
        ):
            return False
        print(text_of_fall(self.rank, samples, dealt.size), file=sys.stderr, flush=True)
        return True

    def check_sizes(self, function: str, sizes: Sequence[int]) -> None:
        """Check that tensors of a collective have the same sizes on all ranks; else a backend aborts or copies a part.

        Raises:
            UsageError: they differ.
        """
        if not self._has_changed and not self._is_one_lost:
            return
        rows = self._times.gather([float(sum(sizes)), float(len(sizes))])
        if len(set(map(tuple, rows))) > 1:
            raise UsageError(refusal_of_gather(function, [int(row[0]) for row in rows]))

    @property
    def _is_one_lost(self) -> bool:
        """Whether a rank is lost: then the shares count as unequal on all ranks, also on one that comes back."""
        return self._survival is not None and len(self._survival.living) < self.ranks

    def close(self) -> None:
        """End what is under way with the other ranks, and note the last updates."""
        rows = self._times.close()
        known = seconds_of_updates(zip(*rows, strict=True), len(self._exchanged)) if rows is not None else []
        unknown = repeat([0.0] * self.ranks)
        for batches, seconds in zip([*self._exchanged, *self._measured], chain(known, unknown), strict=False):
            self._keep(batches, seconds)
        self._exchanged = []
        self._measured = []
        self._at_once = 1

    def end_record(self, error: BaseException | None) -> str:
        """End the folder of the run, and return what the shares have gained; empty if another rank says it.

        Args:
            error: error that ends the script; None without one.
        """
        if self.record is None:
            return unused_line(self.model) if self.rank == 0 else ""
        self.record.end(*outcome_of(error))
        return self.record.line

    def _keep(self, batches: TimedBatches, seconds: list[float]) -> None:
        if self.record is not None:
            self.record.add(batches.timed(seconds))

    def sums_failed(self) -> None:
        """Forget the times of a backward pass that has no sums."""
        self._dealt = []
        self.stopwatch.take()

    def _begin_anew(self) -> None:
        """Begin anew with equal shares, among other ranks than before."""
        self.close()
        self.sums_failed()
        self._has_changed = self._is_one_lost
        if self._division is not None:
            self._division.begin_anew()
            if self.record is not None and self._survival is not None:
                inherits = self._survival.recording_rank.inherits(self._survival.living)
                self.record.regroup(time.perf_counter(), self._division.policy.equal, inherits=inherits)

    def _begin(self, loss: torch.Tensor, size: int, loader: Loader | None) -> None:
        """Agree with the other ranks on what is taken over, and say so."""
        sizes = [row[0] for row in self._times.gather([float(size)])]
        if len(set(sizes)) > 1:
            shown = ", ".join(f"{each:.0f}" for each in sizes)
            raise UsageError(f"the batches of the ranks have {shown} samples: give every rank the same batch size")
        kind = self._weighing.begin(loss, size)
        pieces = Pieces(size, self._settings.pieces, self._settings.max_share)
        costs_of = partial(_costs_of, self._settings)
        self._division = Division(pieces, self.ranks, self.rank, costs_of, self._survival)
        cost_of = self._division.cost_of(loader) if loader is not None else None
        self._is_by_cost = cost_of is not None
        self._limits = RankLimits(pieces, None if self._is_by_cost else self._memory)
        self._work_limit = WorkLimit(pieces.pieces, self._memory if self._is_by_cost else None)
        if self.rank == 0:
            costs = how_known(cost_of, loader.collate_fn) if loader is not None else ""
            line = start_line(self.ranks, self.model, loader, pieces, weighing=kind, costs=costs) + self._note
            print(line, file=sys.stderr, flush=True)
        if self._settings.dry_run:
            raise SystemExit(0)
        if self._survival is None:
            is_writer = self.rank == 0
        else:
            is_writer = not self._survival.is_alone and self._survival.recording_rank.begins()
        if is_writer or self._survival is not None:
            facts = {
                "batch_size": size,
                "parameters": self._parameters,
                SCRIPT: {"model": self.model, "loader": name_of_loader(loader), "weighed_by": kind},
            }
            self.record = RunRecord(self._settings, facts, self.ranks, lag=1 + self._late, is_writer=is_writer)


def _costs_of(settings: BalanceSettings, loader: Loader) -> CostOf | None:
    return cost_function(settings.cost, loader.dataset)
