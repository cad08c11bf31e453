"""Record of a balanced run at rank 0: what its shares have gained, and the folder with its decisions and times."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.catalogue.protocols import balanced
from paceline.core.events import Outcome
from paceline.core.records import DecisionMade, Record, RunEnded, RunResumed, RunStarted, UpdateMade
from paceline.errors import PacelineError
from paceline.policies.share_limits import ShareLimits
from paceline.policies.shares import ShareDecision
from paceline.recording.callback import Callback, RunInfo
from paceline.recording.callbacks.prometheus import Prometheus
from paceline.recording.event_log import Prefix, read_records
from paceline.recording.history import Totals
from paceline.recording.metrics.network_counters import NetworkCounters
from paceline.recording.run_folder import EVENTS, RunFolder, SavedRun
from paceline.recording.schema import SCHEMA
from paceline.recording.script_runs import COMPILED, LIMITS, SCRIPT, SHARES
from paceline.recording.timed_updates import TimedUpdate, TimedUpdates, UpdateRecords
from paceline.shares.gain import Gain
from paceline.shares.settings import BalanceSettings
from paceline.utils.files import lines_of, open_regular

WRITE_EVERY_S = 1.0


class RunRecord:
    """Record of a balanced run.

    Nothing is written on an iteration: once a second, what has come since is passed on, and a thread writes it. If the
    folder cannot be written, this is said, and the script goes on.

    Args:
        settings: settings of the shares, with the folder.
        found: what is known of the run beside them: batch_size, parameters, and names of model, loader and loss.
        ranks: number of ranks.
        lag: number of updates after which the times of one are known.

    Attributes:
        gain: what the shares have gained.
    """

    def __init__(self, settings: BalanceSettings, found: Mapping[str, Any], ranks: int, lag: int) -> None:
        self.gain = Gain()
        self._zero_s = self._ended_s = self._written_s = time.perf_counter()
        self._updates: list[TimedUpdate] = []  # which are not written yet
        self._decisions: list[tuple[float, str, str, dict[str, float]]] = []
        self._records = UpdateRecords()
        self._folder: RunFolder | None = None
        self._metrics: Callback | None = None
        self._totals = Totals()
        self._path: Path | None = None  # of a folder that has all
        self._process = os.getpid()
        self._first: Record = RunStarted(0.0, ranks, "")
        configuration = _configuration(settings, found, ranks, lag)
        if settings.out is not None:
            self._path = path = Path(settings.out)
            self._guarded(lambda: self._open(path, configuration, overwrite=settings.overwrite))
        if settings.metrics is not None:
            self._metrics = Prometheus.parse(settings.metrics)
            self._metrics.on_start(RunInfo(configuration, self._totals, NetworkCounters()))
        self._guarded(lambda: self._pass_on(self._first))

    @property
    def line(self) -> str:
        """Gain, and how to see more, in one line; empty without updates."""
        path, here = self._path, Path.cwd()
        shown = path.relative_to(here) if path is not None and path.is_relative_to(here) else path
        more = f"; paceline report {shown}" if shown is not None else ""
        return f"paceline: {self.gain}{more}" if self.gain.updates else ""

    def add(self, update: TimedUpdate) -> None:
        """Add the next update; its beginning is the end of the one before."""
        update = update._replace(began_s=self._ended_s)
        self._ended_s = update.ended_s
        self.gain.add(update)
        if self._is_wanted:
            self._updates.append(update)
            if update.ended_s - self._written_s >= WRITE_EVERY_S:
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
        if self._is_wanted:
            self._decisions.append((now_s, kind, reason, numbers))

    def end(self, outcome: Outcome, reason: str) -> None:
        """End the folder, if this process has begun one that has not ended."""
        if self._is_wanted and os.getpid() == self._process:
            self._guarded(lambda: self._close(outcome, reason))

    @property
    def _is_wanted(self) -> bool:
        return self._folder is not None or self._metrics is not None

    def _open(self, path: Path, configuration: Mapping[str, Any], *, overwrite: bool) -> None:
        if not _is_continued(path, configuration[SCRIPT]["launch"]):
            self._folder = RunFolder(path, configuration, overwrite=overwrite)
            return
        log, now_s = path / EVENTS, 0.0
        with open_regular(log) as file:
            whole_bytes = sum(len(line) for line in lines_of(file) if line.endswith(b"\n"))
        before = TimedUpdates()
        for record in read_records(log, whole_bytes):
            now_s = record.now_s
            if (update := before.add(record)) is not None:
                self.gain.add(update)
            if isinstance(record, UpdateMade):
                self._records.follow(record)
        self._zero_s -= now_s
        self._folder = RunFolder(path, configuration, keep=Prefix.of(log, whole_bytes))
        self._first = RunResumed(now_s, self._records.version, configuration["workers"], "", "")

    def _write(self) -> None:
        for record in self._new_records():
            self._pass_on(record)

    def _pass_on(self, record: Record) -> None:
        self._totals.count(record)
        for callback in (self._folder, self._metrics):
            if callback is not None:
                callback.on_record(record)

    def _new_records(self) -> Iterator[Record]:
        """Yield the records of the updates since the last call, each with the decisions that were made at its end."""
        updates, self._updates = self._updates, []
        for update in updates:
            began_s, ended_s = update.began_s - self._zero_s, update.ended_s - self._zero_s
            yield from self._records.of(update._replace(began_s=began_s, ended_s=ended_s))
            while self._decisions and self._decisions[0][0] <= update.ended_s:
                _, kind, reason, numbers = self._decisions.pop(0)
                yield DecisionMade(ended_s, kind, reason, numbers=numbers)

    def _close(self, outcome: Outcome, reason: str) -> None:
        self._write()
        now_s = self._ended_s - self._zero_s
        self._pass_on(RunEnded(now_s, outcome, reason, self._records.busy_s, self._records.live_s))
        for callback in (self._folder, self._metrics):
            if callback is not None:
                callback.close()
        self._folder = self._metrics = None

    def _guarded(self, function: Callable[[], None]) -> None:
        """Do something with the folder; if that fails, say so, and do without it."""
        try:
            function()
        except (PacelineError, OSError) as error:
            self._folder = self._path = None
            self._updates = []
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
    if not is_restarted or not (path / EVENTS).exists():
        return False
    return bool(SavedRun(path).configuration.get(SCRIPT, {}).get("launch") == launch)


def _by_rank(samples: Sequence[int]) -> dict[str, float]:
    return {str(rank): float(count) for rank, count in enumerate(samples)}


def _listed(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples))
