"""Record of a balanced run at rank 0: what its shares have gained, and the folder with its decisions and times."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.catalogue.protocols import balanced
from paceline.core.events import Outcome
from paceline.core.records import DecisionMade, Record, RunEnded, RunResumed, RunStarted, WorkerJoined, WorkerLost
from paceline.errors import PacelineError
from paceline.policies.share_limits import ShareLimits
from paceline.policies.shares import ShareDecision
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.callbacks.prometheus import Prometheus
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.recording.run_folder import EVENTS, RunFolder
from paceline.recording.schema import SCHEMA
from paceline.recording.script_runs import COMPILED, LIMITS, REGROUPED, SCRIPT, SHARES
from paceline.recording.timed_updates import TimedUpdate, UpdateRecords
from paceline.shares.gain import Gain
from paceline.shares.log_so_far import LogSoFar, is_log_of
from paceline.shares.settings import BalanceSettings
from paceline.shares.unwritten import TimedDecision, Unwritten

WRITE_EVERY_S = 1.0
KEPT_S = 60.0  # of what another rank writes, which may be lost before it has
LOST = "its process has ended"


class RunRecord:
    """Record of a balanced run.

    Nothing is written on an iteration: once a second, what has come since is passed on, and a thread writes it. If the
    folder cannot be written, this is said, and the script goes on.

    One rank writes. Where ranks may be lost, the others keep what it may not have written, and one of them goes on.

    Args:
        settings: settings of the shares, with the folder.
        found: what is known of the run beside them: batch_size, parameters, and names of model, loader and loss.
        ranks: number of ranks.
        lag: number of updates after which the times of one are known.
        is_writer: whether this rank writes.

    Attributes:
        gain: what the shares have gained.
    """

    def __init__(
        self, settings: BalanceSettings, found: Mapping[str, Any], ranks: int, lag: int, *, is_writer: bool = True
    ) -> None:
        self.gain = Gain()
        self._settings = settings
        self._configuration = _configuration(settings, found, ranks, lag)
        self._is_writer = is_writer
        self._zero_s = self._ended_s = self._decided_s = self._written_s = time.perf_counter()
        self._unwritten = Unwritten(self._zero_s)
        self._records = UpdateRecords()
        self._living = set(range(ranks))
        self._folder: RunFolder | None = None
        self._metrics: Callback | None = None
        self._totals = Totals()
        self._path = Path(settings.out) if settings.out is not None else None  # of a folder that has all
        self._process = os.getpid()
        self._has_ended = False
        if is_writer:
            self._guarded(self._begin)

    @property
    def line(self) -> str:
        """Gain, and how to see more, in one line; empty without updates, and in a rank that does not write."""
        path, here = self._path, Path.cwd()
        shown = path.relative_to(here) if path is not None and path.is_relative_to(here) else path
        more = f"; paceline report {shown}" if shown is not None else ""
        return f"paceline: {self.gain}{more}" if self.gain.updates and self._is_writer else ""

    def add(self, update: TimedUpdate) -> None:
        """Add the next update; its beginning is the end of the one before."""
        update = update._replace(began_s=self._ended_s)
        self._ended_s = update.ended_s
        if self._is_writer:
            self.gain.add(update)
        if not self._is_wanted:
            return
        self._unwritten.add(update)
        if not self._is_writer:
            self._unwritten.forget(update.ended_s - KEPT_S)
        elif update.ended_s - self._written_s >= WRITE_EVERY_S:
            self._written_s = update.ended_s
            self._guarded(self._write)

    def decided(self, now_s: float, decision: ShareDecision) -> None:
        """Add a decision that was made at the end of an update."""
        reason = f"{_listed(decision.shares)} samples: {decision.reason}"
        self._add_decision(now_s, SHARES, reason, _by_rank(decision.shares))

    def limited(self, now_s: float, limits: ShareLimits) -> None:
        """Add limits of the shares, which hold for what is decided at the end of an update."""
        few = ", and six sizes for torch.compile" if limits.is_compiled else ""
        reason = f"at most {_listed(limits.most)} samples by memory{few}"
        self._add_decision(now_s, LIMITS, reason, {**_by_rank(limits.most), COMPILED: float(limits.is_compiled)})

    def _add_decision(self, now_s: float, kind: str, reason: str, numbers: dict[str, float]) -> None:
        self._decided_s = now_s
        if self._is_wanted:
            self._unwritten.add(TimedDecision(now_s=now_s, kind=kind, reason=reason, numbers=numbers))

    def regroup(self, now_s: float, equal: Sequence[int], *, inherits: bool) -> None:
        """Note that other ranks go on, which begin anew with equal shares, or the same ones without an update.

        Args:
            now_s: time at which they do.
            equal: these shares; 0 for a rank that is lost.
            inherits: whether this rank goes on with the record of one that is lost.
        """
        if inherits and self._is_wanted:
            self._is_writer = True
            self._guarded(self._continue_for_another)
        if self._is_writer and self._is_wanted:
            self._guarded(partial(self._write_ranks, now_s, equal))
        self._unwritten = Unwritten(now_s)
        self._ended_s = now_s

    def end(self, outcome: Outcome, reason: str) -> None:
        """End the folder, if this process has begun one that has not ended."""
        if self._is_writer and self._is_wanted and os.getpid() == self._process:  # not in a forked process
            self._guarded(partial(self._close, outcome, reason))
            self._has_ended = True

    @property
    def _is_wanted(self) -> bool:
        return not self._has_ended and (self._path is not None or self._metrics is not None)

    def _begin(self) -> None:
        """Begin to write, also after all ranks were started again."""
        ranks: int = self._configuration["workers"]
        first: Record = RunStarted(0.0, ranks, "")
        if self._path is not None:
            if _is_continued(self._path, self._configuration[SCRIPT]["launch"]):
                log = self._continue(self._path, with_end=True)
                self._zero_s -= log.now_s
                first = RunResumed(
                    now_s=log.now_s, version=self._records.version, workers=ranks, stop_before="", changes=""
                )
            else:
                self._folder = RunFolder(self._path, self._configuration, overwrite=self._settings.overwrite)
        self._serve_metrics()
        self._pass_on(first)

    def _continue_for_another(self) -> None:
        """Go on with the log of a rank that is lost, from what it has not written."""
        assert self._path is not None
        log = self._continue(self._path, with_end=False)
        self._zero_s = self._unwritten.leave_out(log.updates, log.decisions) - log.now_s
        for update in self._unwritten.updates:
            self.gain.add(update)
        self._living = log.living
        try:
            self._serve_metrics()
        except (PacelineError, OSError) as error:
            print(f"paceline: the metrics are not served any more: {error}", file=sys.stderr, flush=True)
        if self._metrics is not None:
            self._metrics.on_record(RunStarted(log.now_s, self._configuration["workers"], ""))

    def _continue(self, path: Path, *, with_end: bool) -> LogSoFar:
        log = LogSoFar(path, with_end=with_end)
        self.gain = log.gain
        self._records = log.records
        self._folder = RunFolder(path, self._configuration, keep=log.prefix)
        return log

    def _serve_metrics(self) -> None:
        if self._settings.metrics is not None:
            metrics = Prometheus.parse(self._settings.metrics)
            metrics.on_start(RunInfo(self._configuration, self._totals, NetworkCounters()))
            self._metrics = metrics

    def _write(self, *, is_last: bool = False) -> None:
        for record in self._unwritten.take(self._records, self._zero_s, is_last=is_last):
            self._pass_on(record)

    def _write_ranks(self, now_s: float, equal: Sequence[int]) -> None:
        """Write which ranks go on, at once: another one may have to go on from there."""
        self._write(is_last=True)
        at_s, living = now_s - self._zero_s, {rank for rank, share in enumerate(equal) if share}
        for rank in sorted(self._living - living):
            self._pass_on(WorkerLost(now_s=at_s, worker=rank, reason=LOST, event_s=at_s))
        for rank in sorted(living - self._living):
            self._pass_on(WorkerJoined(now_s=at_s, worker=rank, event_s=at_s))
        self._living = living
        reason = f"ranks {_listed(sorted(living))} go on, with equal shares"
        self._pass_on(DecisionMade(now_s=at_s, kind=REGROUPED, reason=reason, numbers=_by_rank(equal)))
        if self._folder is not None:
            self._folder.settle()

    def _pass_on(self, record: Record) -> None:
        self._totals.count(record)
        for callback in (self._folder, self._metrics):
            if callback is not None:
                callback.on_record(record)

    def _close(self, outcome: Outcome, reason: str) -> None:
        self._write(is_last=True)
        now_s = max(self._ended_s, self._decided_s) - self._zero_s
        self._pass_on(
            RunEnded(
                now_s=now_s, outcome=outcome, reason=reason, busy_s=self._records.busy_s, live_s=self._records.live_s
            )
        )
        for callback in (self._folder, self._metrics):
            if callback is not None:
                callback.close()

    def _guarded(self, function: Callable[[], None]) -> None:
        """Do something with the folder; if that fails, say so, and do without it."""
        try:
            function()
        except (PacelineError, OSError) as error:
            self._folder = self._path = None
            self._unwritten = Unwritten(self._ended_s)
            print(f"paceline: the run is not recorded: {error}", file=sys.stderr, flush=True)


def _configuration(settings: BalanceSettings, found: Mapping[str, Any], ranks: int, lag: int) -> dict[str, Any]:
    about = {"pieces": settings.pieces, "max_share": settings.max_share, "lag": lag, "launch": settings.launch}
    return {
        "schema": SCHEMA,
        "job": Path(sys.argv[0]).name or "script",
        "protocol": balanced(settings.pieces, leases=1, max_share=settings.max_share).name,
        "cluster": f"{ranks} ranks, {dist.get_backend()}",
        "workers": ranks,
        "batch_size": found["batch_size"],
        "parameters": found["parameters"],
        SCRIPT: {**found[SCRIPT], **about},
    }


def _is_continued(path: Path, launch: str) -> bool:
    """Return whether the launcher has started the ranks again since the run in this folder began."""
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return is_restarted and (path / EVENTS).exists() and is_log_of(path, launch)


def _by_rank(samples: Sequence[int]) -> dict[str, float]:
    return {str(rank): float(count) for rank, count in enumerate(samples)}


def _listed(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples))
