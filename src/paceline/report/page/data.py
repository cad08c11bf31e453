"""Data of the page as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from paceline.report.curves import AXES, CurveLine, Group, panels, switches
from paceline.report.mean_grid import HeatMap
from paceline.report.page.packing import packed_updates, packed_work, quantum_s
from paceline.report.run_data import FATES, RunData
from paceline.report.worker_stats import RoundTripStats, heat_map, round_trips, staleness


def page_json(runs: Sequence[RunData], groups: Sequence[Group]) -> str:
    """Return the data of the charts as JSON without "<", so that it cannot end its script element."""
    content = {
        "axes": AXES,
        "panels": panels(groups),
        "fates": FATES,
        "groups": [_group(group, runs) for group in groups],
        "runs": [_run(run) for run in runs],
    }
    text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return text.replace("<", "\\u003c")


def _group(group: Group, runs: Sequence[RunData]) -> dict[str, Any]:
    return {
        "label": group.label,
        "runs": [next(i for i, run in enumerate(runs) if run is member) for member in group.runs],
        "lines": {axis: {name: _line(line) for name, line in panels.items()} for axis, panels in group.lines.items()},
    }


def _line(line: CurveLine) -> dict[str, Any]:
    content: dict[str, Any] = {"x": _rounded(line.x), "mean": _rounded(line.mean), "steps": line.steps}
    if line.low is not line.mean:
        content |= {"low": _rounded(line.low), "high": _rounded(line.high)}
    return content


def _run(run: RunData) -> dict[str, Any]:
    return {
        **workers_json(run, round_trips(run)),
        "first_update": 0,
        "first_protocol": next((mark.reason for mark in run.marks if mark.kind == "protocol"), ""),
        "switches": switches(run),
        "heat": heat_json(heat_map(run)),
        "staleness": staleness(run),
        "shares": shares_json(run),
    }


def workers_json(run: RunData, rows: Sequence[RoundTripStats | None]) -> dict[str, Any]:
    """Return the data of the charts of tasks.

    Args:
        run: data of the run.
        rows: round-trip times of each worker.
    """
    return {
        "label": run.label,
        "begin_s": 0.0,
        "workers": run.workers,
        "end_s": run.end_s,
        "quantum_s": quantum_s(run),
        "live": run.live,
        "endings": [[*ending] for ending in run.endings],
        "reasons": run.reasons,
        "round_trips": [row and {**row._asdict(), "quantiles_s": _rounded(row.quantiles_s)} for row in rows],
        "work": packed_work(run),
        "updates": packed_updates(run),
    }


def heat_json(heat: HeatMap) -> dict[str, Any]:
    """Return the data of the heat map."""
    return {
        "columns": heat.mean_s.shape[1],
        "end_s": heat.end_s,
        "mean_s": [[_rounded(value) for value in row] for row in heat.mean_s.tolist()],
    }


def shares_json(run: RunData) -> dict[str, Any] | None:
    """Return the data of the chart of shares; None for a run whose workers do not share the samples."""
    if run.shares is None:
        return None
    heat = heat_json(run.shares.share_map(run.workers))
    equal = run.run.configuration.get("batch_size")
    return {"columns": heat["columns"], "end_s": heat["end_s"], "mean": heat["mean_s"], "equal": equal}


def _rounded(values: Any) -> Any:
    """Round to six significant digits, more than a screen shows."""
    if isinstance(values, float):
        return float(f"{values:.6g}")
    with np.errstate(divide="ignore", invalid="ignore"):
        return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float).tolist()]
