"""What the page and the terminal show of a run at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from paceline.recording.script_runs import SCRIPT
from paceline.report.curves import AXES, RATES, metric_panel, metric_title
from paceline.report.page.data import heat_json, shares_json, workers_json
from paceline.report.page.parts import (
    losses_table,
    mark_rows,
    memory_sentences,
    run_table,
    sample_bars,
    straggler_paragraphs,
    time_bars,
    waiting_bars,
)
from paceline.report.run_data import FATES, RunData
from paceline.report.stragglers import slow_workers
from paceline.report.summary_table import final_values, known, number, row
from paceline.report.worker_stats import RoundTripStats, WorkerLosses, round_trips, worker_losses
from paceline.utils.wording import counted
from paceline.watch.live_run import KEPT_TASKS, LiveRun
from paceline.watch.merged_points import MergedPoints
from paceline.watch.transferred_bytes import in_bytes, vector_bytes

COLUMNS = ("seed", "seconds", "updates", "mean k", "used", "dropped", "interrupted", "mean staleness")
BYTES = ("gradients received", "versions sent")  # columns, in bytes without compression
STALENESS = "update staleness"  # panel of the page


class LiveView:
    """Numbers, sentences and charts of a run now; each is computed once.

    Args:
        live: data of the run.
    """

    def __init__(self, live: LiveRun) -> None:
        self.live = live

    @cached_property
    def recent(self) -> RunData:
        """Recent tasks and updates, with the statistics of the whole run."""
        return self.live.data()

    @cached_property
    def round_trips(self) -> Sequence[RoundTripStats | None]:
        """Round-trip times of each worker, of its recent tasks."""
        return round_trips(self.recent)

    @cached_property
    def stragglers(self) -> Sequence[str]:
        """Sentences on slow workers: their recent round trips, and their share of all gradients."""
        tasks, used = self.live.counts(self.recent)
        return slow_workers(self.round_trips, tasks, used, self.recent.waits_s, self.recent.end_s)

    @cached_property
    def worker_seconds(self) -> Mapping[str, float]:
        """Worker-seconds of the whole run by fate of the task, and the idle ones."""
        return self.live.sums(self.recent).worker_seconds(sum(self._live_times))

    @cached_property
    def activities(self) -> Mapping[str, float]:
        """Worker-seconds of the whole run spent computing, communicating and waiting."""
        return self.live.sums(self.recent).activities(sum(self._live_times))

    @cached_property
    def losses(self) -> Sequence[WorkerLosses]:
        """Losses and hazards of the workers that were lost, the largest hazard first."""
        return worker_losses(self.recent.losses_of_workers, self._live_times)

    @cached_property
    def _live_times(self) -> Sequence[float]:
        return self.live.live_times(self.recent)

    @property
    def name(self) -> str:
        """Job and protocol."""
        return f"{self.live.run.configuration.get('job', '?')} with {self.recent.protocol}"

    @property
    def headline(self) -> str:
        """Job, protocol and the latest numbers as a sentence."""
        stats, latest = self.recent.stats, self.live.latest
        if latest is None:
            return f"{self.name}: no update yet"
        if self.live.shares is not None:
            return f"{self.name}: {', '.join([str(self.live.shares.gain), *final_values(self.recent)])}"
        made = f"{counted(stats.updates, 'update')} in {number(latest.now_s)} s"
        return f"{self.name}: {', '.join([made, *final_values(self.recent), f'k {latest.k}'])}"

    @property
    def quorum(self) -> str:
        """Number of gradients of the latest update, and its reasons."""
        latest, reasons = self.live.latest, self.recent.reasons
        if latest is None:
            return ""
        decided = int(self.recent.updates["quorum_reason"][-1])
        why = f"; decided: {reasons[decided]}" if decided >= 0 and reasons[decided] not in latest.reason else ""
        return f"update {latest.version}: k = {latest.k}, {latest.reason}{why}"

    @cached_property
    def cells(self) -> Mapping[str, Any]:
        """Cells of the run by column: those of the report that the headline does not have, and bytes."""
        total_s = sum(self.activities.values())
        cells = {name: value for name, value in row(self.recent).items() if name in COLUMNS}
        cells["idle"] = known(self.worker_seconds["idle"] / total_s) if total_s else None
        configuration = self.live.run.configuration
        size_bytes = vector_bytes(configuration)
        is_sent = SCRIPT not in configuration and not self.recent.memory_sharers  # sums of scripts have no server
        if size_bytes is not None and is_sent:
            tasks, _ = self.live.counts(self.recent)
            vectors = self.live.received, int(tasks.sum())
            cells |= {name: in_bytes(count * size_bytes) for name, count in zip(BYTES, vectors, strict=True)}
        return cells

    def texts(self) -> dict[str, str]:
        """Return the HTML of the parts of the page, by the name of their elements."""
        label, newest_first = self.recent.label, self.recent.marks[::-1]
        samples = self.live.sums(self.recent).samples_by_fate()
        return {
            "stragglers": straggler_paragraphs([(label, self.stragglers)]),
            "table": run_table([self.cells]),
            "quorum": escape(self.quorum),
            "losses": losses_table([(label, self.losses)]),
            "decisions": mark_rows(newest_first, self.live.marks) if newest_first else "",
            "bars": waiting_bars([(label, self.live.shares)] if self.live.shares is not None else [], 1)
            + time_bars([(label, self.worker_seconds)], [(label, self.activities)], memory_sentences([self.recent]))
            + sample_bars([(label, samples)]),
        }

    def curves(self) -> dict[str, Any]:
        """Return the data of the curves."""
        live = self.live
        metrics = {metric_panel(name): name for name in live.metrics}
        titles = {panel: metric_title(name) for panel, name in metrics.items()}
        rates = RATES if len(live.rates) else {}
        return {
            "axes": AXES,
            "panels": {"loss": "training loss", **titles, **rates, "k": "quorum k", STALENESS: "mean staleness"},
            "tables": [
                _table(live.progress, self._progress, frozenset({"k"})),
                *[_table(live.metrics[name], {panel: "value"}) for panel, name in metrics.items()],
                _table(live.rates, {name: name for name in rates}, frozenset(rates)),
            ],
            "switches": [switch._asdict() for switch in live.switches],
            "first_update": live.updates - len(self.recent.updates["k"]),
        }

    @property
    def _progress(self) -> dict[str, str]:
        """Column of each panel of the progress; with shares each update has a fresh gradient of every rank."""
        return {"loss": "loss"} if self.live.shares is not None else {"loss": "loss", "k": "k", STALENESS: "staleness"}

    def tasks(self) -> dict[str, Any]:
        """Return the data of the charts of workers."""
        return {
            **workers_json(self.recent, self.round_trips),
            "begin_s": self._complete_since_s,
            "fates": FATES,
            "first_protocol": self.live.first_protocol,
            "heat": heat_json(self.live.heat_map()),
            "staleness": self.live.staleness(),
            "shares": shares_json(self.recent),
        }

    @property
    def _complete_since_s(self) -> float:
        """Time from which on all tasks of all workers are among the recent ones."""
        work = self.recent.work
        starts = np.searchsorted(work["worker"], np.arange(self.recent.workers + 1))
        full = starts[:-1][np.diff(starts) >= KEPT_TASKS]
        return float(work["start_s"][full].max(initial=0.0))


def _table(points: MergedPoints, panels: Mapping[str, str], steps: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the columns of some curves that share their positions.

    Args:
        points: the curves.
        panels: column of each panel.
        steps: panels in which a value holds from the previous point to its own.
    """
    columns = {name: column.astype(np.float32) for name, column in points.columns().items()}
    return {"names": [[panel, column, panel in steps] for panel, column in panels.items()], "columns": columns}
