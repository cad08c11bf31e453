"""Balancer of one rank: which shares its loaders cut by, what its backward passes weigh, and when shares change."""

from __future__ import annotations

import sys
import time
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from paceline.balance.batches import CutSampler, Dealt, is_dealt_by_rank
from paceline.balance.gain import Gain
from paceline.balance.loss import Reading, read_loss
from paceline.balance.rank_times import RankTimes
from paceline.balance.settings import BalanceSettings
from paceline.balance.start_line import refusal_of_loader, refusal_of_loss, refusal_of_tokens, start_line
from paceline.balance.stopwatch import CudaClock, HostClock, Stopwatch
from paceline.errors import UsageError
from paceline.policies.shares import Pieces, ShareBalancer

KINDS = ("samples", "tokens", "none")
READ_ALWAYS, READ_EVERY = 10, 100  # iterations in which the loss of a device, which is waited for, is read again


class Balancer:
    """Unequal shares of the global batch in one rank, from the first model on.

    The shares of an update are decided on each rank from the same gathered times, so all ranks decide the same without
    a message.

    Args:
        settings: settings of the shares.
        model: name of the model, for messages.
        device: device of the model.
    """

    def __init__(self, settings: BalanceSettings, model: str, device: torch.device) -> None:
        self._settings = settings
        self._model = model
        self._is_on_host = device.type == "cpu"
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.stopwatch = Stopwatch(HostClock() if self._is_on_host else CudaClock())
        self._times = RankTimes(self.ranks)
        self._training: WeakSet[DataLoader[Any]] = WeakSet()
        self._policy: ShareBalancer | None = None
        self._sizes: Pieces | None = None
        self._weighing = ""
        self._latest: tuple[DataLoader[Any] | None, Dealt | None] = (None, None)
        self._since: list[Dealt] = []  # batches since the last exchange
        self._before: list[Dealt] = []  # batches of the exchange that is under way
        self._known_sizes: set[int] = set()
        self._losses_read = 0
        self.gain = Gain()

    def sampler_of(self, loader: DataLoader[Any], sampler: Any) -> Any:
        """Return the batch sampler that a loader is to read: one that is cut, where the script's can be."""
        if not is_dealt_by_rank(sampler, self.ranks):
            return sampler
        return CutSampler(sampler, self.ranks, self.rank, lambda size: self._shares_for(loader, size))

    def handed_out(self, loader: DataLoader[Any] | None, sampler: Any) -> None:
        """Note the batch that a loader has just returned."""
        dealt = sampler.dealt.popleft() if isinstance(sampler, CutSampler) else None
        self._latest = loader, dealt
        if dealt is not None and loader in self._training:
            self._since.append(dealt)

    def weight_of(self, loss: torch.Tensor) -> float:
        """Return the factor of a backward pass."""
        loader, dealt = self._latest
        if dealt is None:
            raise UsageError(refusal_of_loader(loader, self.ranks))
        if loader is not None and loader not in self._training:
            self._training.add(loader)
            self._since.append(dealt)
        own = dealt.samples_of(self.rank)
        reading = self._read(loss, own)
        if not self._weighing:
            self._begin(reading, dealt.size, loader)
        if self._weighing == "none":
            return 1.0
        if self._weighing == "tokens":
            tokens = read_loss(loss, own).divisor or 0.0
            return tokens * self.ranks / self._times.sum(tokens)
        if reading is not None and reading.weighing == "tokens" and self._settings.weigh == "auto":
            raise UsageError(refusal_of_tokens(reading))
        return own / dealt.size

    def end_of_sums(self) -> None:
        """Exchange times, after a backward pass whose sums have ended, and decide by those of the exchange before."""
        if not self._since or self._policy is None:
            return
        now_s = time.perf_counter()
        rows = self._times.end()
        if rows is not None:
            self._decide([row[0] for row in rows], now_s)
        sizes = {dealt.samples_of(self.rank) for dealt in self._since}
        seconds = self.stopwatch.take()
        self._before, self._since = self._since, []
        is_first = not sizes <= self._known_sizes  # of its shape: a device tunes, and a compiler compiles
        self._known_sizes |= sizes
        self._times.begin([0.0 if is_first else seconds])

    def _decide(self, seconds: list[float], now_s: float) -> None:
        assert self._policy is not None
        samples = [
            sum(dealt.shares[i] if dealt.shares else dealt.size for dealt in self._before) for i in range(self.ranks)
        ]
        equal = sum(dealt.size for dealt in self._before)
        self.gain.add(now_s, seconds, samples, equal)
        self._policy.decide(samples, seconds)

    def _shares_for(self, loader: DataLoader[Any], size: int) -> tuple[int, ...] | None:
        """Return the shares of the batches that a loader asks for now; None for equal ones."""
        if self._policy is None or self._sizes is None or loader not in self._training:
            return None
        shares = self._policy.shares
        is_equal = size != self._sizes.batch_size or shares.count(size) == self.ranks
        return None if is_equal else shares

    def _read(self, loss: torch.Tensor, samples: int) -> Reading | None:
        """Return what a loss shows, in iterations in which it is looked at."""
        self._losses_read += 1
        is_due = self._is_on_host or self._losses_read <= READ_ALWAYS or self._losses_read % READ_EVERY == 0
        return read_loss(loss, samples) if is_due else None

    def _begin(self, reading: Reading | None, size: int, loader: DataLoader[Any] | None) -> None:
        """Agree with the other ranks on what is taken over, and say so."""
        given = self._settings.weigh
        found = given if given != "auto" else (reading.weighing if reading is not None else None)
        self._times.begin([float(KINDS.index(found)) if found else -1.0, float(size)])
        rows = self._times.end() or []
        kinds = {int(row[0]) for row in rows}
        if -1 in kinds or (2 in kinds and len(kinds) > 1):
            raise UsageError(refusal_of_loss(reading))
        if {row[1] for row in rows} != {float(size)}:
            sizes = ", ".join(f"{row[1]:.0f}" for row in rows)
            raise UsageError(f"the batches of the ranks have {sizes} samples: give every rank the same batch size")
        self._weighing = KINDS[2] if 2 in kinds else KINDS[max(kinds)]
        self._sizes = Pieces(size, self._settings.pieces, self._settings.max_share)
        self._policy = ShareBalancer(self.ranks, self._sizes)
        if self.rank == 0:
            print(start_line(self._model, loader, self.ranks, self._sizes, self._weighing), file=sys.stderr, flush=True)
        if self._settings.dry_run:
            raise SystemExit(0)
