"""Static parts of the page: tables, bars and legends. All text from the user is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.report.curves import Group, panels
from paceline.report.run_data import FATES, Mark, RunData
from paceline.report.share_totals import ShareTotals
from paceline.report.stragglers import stragglers
from paceline.report.summary_table import number
from paceline.report.worker_stats import (
    ACTIVITIES,
    IDLE,
    WorkerLosses,
    activities,
    live_times,
    samples,
    worker_losses,
    worker_seconds,
)
from paceline.utils.wording import counted

TEXT_COLUMNS = {"protocol", "outcome"}
SHARES = {"idle", "accuracy"}
MOST_DECISIONS = 500
MOST_LOST = 50
MOST_RANKS = 16  # bars of one run
LEAST_SHARE = 0.0005  # smallest share shown in a bar


def run_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with one row per run.

    Args:
        rows: cells of each run by column.
    """
    names = dict.fromkeys(name for cells in rows for name in cells)
    rows = [{name: cells.get(name) for name in names} for cells in rows]
    head = "".join(f"<th scope='col'{_kind(name)}>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>"
        + "".join(f"<td{_kind(name)}>{escape(_shown(name, value))}</td>" for name, value in cells.items())
        + "</tr>"
        for cells in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='scroll' tabindex='0' role='region' aria-label='runs'>{table}</div>"


def metric_charts(groups: Sequence[Group]) -> str:
    """Return the containers of the charts, one per evaluated metric."""
    charts = [(name, title) for name, title in panels(groups).items() if name not in {"loss", "k"}]
    return "\n".join(
        f"<div class='part'><h3>{escape(title[:1].upper() + title[1:])}</h3>"
        f"<div class='chart' id='{escape(name)}'></div></div>"
        for name, title in charts
    )


def notices(runs: Sequence[RunData]) -> str:
    """Return notices on runs without an end or without updates."""
    texts = [
        f"{run.label}: {run.outcome}. Unfinished tasks of its workers are not shown."
        for run in runs
        if not run.has_ended
    ]
    texts += [f"{run.label}: no update yet." for run in runs if not run.stats.updates]
    return "".join(f"<p class='notice'>{escape(text)}</p>" for text in texts)


def configuration(runs: Sequence[RunData]) -> str:
    """Return the configuration of each run, collapsed."""
    tables = [(run.label, _pairs({"folder": run.run.path, **run.run.configuration})) for run in runs]
    return _collapsed("Configuration", tables)


def decisions(runs: Sequence[RunData]) -> str:
    """Return the decisions of each run except quorums, collapsed."""
    tables = [(run.label, mark_rows(run.marks[:MOST_DECISIONS], len(run.marks))) for run in runs if run.marks]
    return _collapsed("Decisions", tables)


def _collapsed(title: str, tables: Sequence[tuple[str, str]]) -> str:
    """Return collapsed tables under one title; each of several tables has its own title too."""
    boxes = [f"<div class='scroll'><table class='configuration'>{table}</table></div>" for _, table in tables]
    if not tables:
        return ""
    if len(tables) == 1:
        return _details(f"{title} of {tables[0][0]}", boxes[0])
    return _details(title, "".join(_details(label, box) for (label, _), box in zip(tables, boxes, strict=True)))


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def straggler_sentences(runs: Sequence[RunData]) -> str:
    """Return one paragraph per run on its stragglers."""
    return straggler_paragraphs([(run.label, stragglers(run)) for run in runs])


def straggler_paragraphs(found: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return a paragraph on the stragglers of a run; for several runs, that of the first one with the others collapsed.

    Args:
        found: label of each run, and the sentences on its stragglers.
    """
    texts = [(label, f"{'; '.join(sentences)}.") for label, sentences in found if sentences]
    if not texts:
        return ""
    label, first = texts[0]
    if len(found) == 1:
        return f"<p class='notice'>{escape(first[0].upper() + first[1:])}</p>"
    head = f"Stragglers in {len(texts)} of {counted(len(found), 'run')}. {label}: {first}"
    if len(texts) == 1:
        return f"<p class='notice'>{escape(head)}</p>"
    others = "".join(f"<p>{escape(f'{label}: {text}')}</p>" for label, text in texts[1:])
    return f"<details class='notice'><summary>{escape(head)}</summary>{others}</details>"


def seconds_section(runs: Sequence[RunData]) -> str:
    """Return the bars of the worker-seconds by fate and by activity."""
    by_fate = [(run.label, worker_seconds(run)) for run in runs]
    return time_bars(by_fate, [(run.label, activities(run)) for run in runs], memory_sentences(runs))


def memory_sentences(runs: Sequence[RunData]) -> list[str]:
    """Return one sentence per run whose workers shared memory with the server."""
    return [
        f"{run.label}: {run.memory_sharers} of {counted(run.workers, 'worker')} shared memory with the server, so "
        "versions and gradients were not sent."
        for run in runs
        if run.memory_sharers
    ]


def time_bars(
    by_fate: Sequence[tuple[str, Mapping[str, float]]],
    by_activity: Sequence[tuple[str, Mapping[str, float]]],
    notes: Sequence[str],
) -> str:
    """Return the section with the bars of worker-seconds; empty if there are none.

    Args:
        by_fate: label of each run, and its worker-seconds by fate of the task.
        by_activity: label of each run, and its worker-seconds by activity.
        notes: sentences on how they communicated.
    """
    if not any(sum(parts.values()) for _, parts in by_fate):
        return ""
    fates = fate_legend((*FATES, IDLE)) + _bars(by_fate, "worker-seconds")
    head = "<h3>Computing, communicating, waiting</h3>"
    caption = (
        "<p class='caption'>Communicating is the time that a worker waits for the network. Under all-reduce it is the "
        "part of the sum that is not hidden behind computing. Waiting is all other time: that of idle workers, which "
        "have no task, and waits within a task.</p>"
    )
    spent = fate_legend(ACTIVITIES) + _bars(by_activity, "worker-seconds")
    told = [f"<p class='caption'>{escape(note)}</p>" for note in notes]
    return _section("seconds-title", "Use of worker time", [fates, head, spent, *told, caption])


def waiting_section(runs: Sequence[RunData]) -> str:
    """Return the bars of the time of each rank, of runs whose ranks share the samples."""
    return waiting_bars([(run.label, run.shares) for run in runs if run.shares is not None], len(runs))


def waiting_bars(found: Sequence[tuple[str, ShareTotals]], runs: int) -> str:
    """Return the section with what each rank did; empty without shares.

    Args:
        found: label of each run whose ranks share the samples, and its sums.
        runs: number of runs on the page.
    """
    if not found:
        return ""
    bars = []
    for label, shares in found:
        ranks = shares.activities()
        longest = sorted(ranks, key=lambda rank: -ranks[rank]["waiting"])[:MOST_RANKS]
        rows = [(f"rank {rank}: {number(ranks[rank]['waiting'])} s", ranks[rank]) for rank in sorted(longest)]
        left_out = f"<p class='caption'>The {len(rows)} of {len(ranks)} ranks that waited longest.</p>"
        title = f"<h3>{escape(label)}</h3><p>{escape(str(shares.gain))}</p>" if runs > 1 else ""
        queue = f"<p class='caption'>{escape(shares.queue)}.</p>" if shares.queue else ""
        bars.append(title + _bars(rows, "seconds") + (left_out if len(rows) < len(ranks) else "") + queue)
    caption = (
        "<p class='caption'>Waiting: for the slowest rank of each update. Communicating: sums, the step of the "
        "optimizer, and all else that is not loading, forward or backward.</p>"
    )
    return _section("waiting-title", "Who waited", [fate_legend(ACTIVITIES), *bars, caption])


def samples_section(runs: Sequence[RunData]) -> str:
    """Return one bar per run with the shares of the samples."""
    return sample_bars([(run.label, samples(run)) for run in runs])


def sample_bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Return the section with the bars of samples by fate; empty if there are none."""
    if not any(sum(parts.values()) for _, parts in rows):
        return ""
    bars = fate_legend(FATES[:3]) + _bars(rows, "samples")
    return _section("samples-title", "Samples applied and dropped", [bars])


def losses_section(runs: Sequence[RunData]) -> str:
    """Return the table of the losses of workers; empty if none was lost."""
    return losses_table([(run.label, worker_losses(run.losses_of_workers, live_times(run))) for run in runs])


def losses_table(losses: Sequence[tuple[str, Sequence[WorkerLosses]]]) -> str:
    """Return the section with the losses of workers of some runs; empty if none was lost."""
    head = ("run", "worker", "live", "lost", "hazard per hour")
    rows = [
        (label, str(row.worker), f"{number(row.live_s)} s", str(row.losses), number(3600 * row.hazard))
        for label, of_run in losses
        for row in of_run[:MOST_LOST]
    ]
    if not rows:
        return ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}"
    scrolled = f"<div class='scroll'><table class='configuration'>{table}</table></div>"
    caption = (
        "<p class='caption'>Hazard: expected losses of this worker in an hour, estimated from its losses and its live "
        "time, and from those of all workers.</p>"
    )
    return _section("losses-title", "Losses of workers", [scrolled, caption])


def _section(name: str, title: str, content: Sequence[str]) -> str:
    return f"<section aria-labelledby='{name}'><h2 id='{name}'>{title}</h2>{''.join(content)}</section>"


def fate_legend(fates: Sequence[str] = (*FATES, IDLE)) -> str:
    """Return the legend of the colours and textures of tasks."""
    entries = "".join(f"<span><i class='swatch {fate}'></i>{fate}</span>" for fate in fates)
    return f"<div class='legend'>{entries}</div>"


def run_options(runs: Sequence[RunData]) -> str:
    """Return the options of the selection of a run."""
    return "".join(f"<option>{escape(run.label)}</option>" for run in runs)


def _bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    return f"<div class='bars'>{''.join(_bar(label, parts, unit) for label, parts in rows)}</div>"


def _bar(label: str, parts: Mapping[str, float], unit: str) -> str:
    total = sum(parts.values())
    if not total:
        return f"<div class='label'>{escape(label)}</div><div><small>no data yet</small></div>"
    shares = {name: value / total for name, value in parts.items() if value / total >= LEAST_SHARE}
    pieces = "".join(
        f"<i class='{name}' style='width:{share:.3%}' title='{name} {share:.1%}'></i>" for name, share in shares.items()
    )
    text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    return (
        f"<div class='label'>{escape(label)}</div>"
        f"<div><div class='bar' aria-hidden='true'>{pieces}</div><small>{text} of {number(total)} {unit}</small></div>"
    )


def _pairs(mapping: Mapping[str, Any]) -> str:
    return "".join(
        f"<tr><th scope='row'>{escape(str(key))}</th><td>{_value(value)}</td></tr>" for key, value in mapping.items()
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"<table class='configuration'>{_pairs(value)}</table>"
    return escape(str(value))


def mark_rows(marks: Sequence[Mark], count: int) -> str:
    """Return rows of a table with decisions.

    Args:
        marks: the decisions that are shown.
        count: number of decisions of the run.
    """
    head = "<tr><th>seconds</th><th>updates</th><th>kind</th><th>reason</th></tr>"
    rows = "".join(
        f"<tr><td>{mark.time_s:.5g}</td><td>{mark.updates}</td><td>{escape(mark.kind)}</td><td>{escape(mark.reason)}</td></tr>"
        for mark in marks
    )
    left_out = count - len(marks)
    return head + rows + (f"<tr><td colspan='4'>and {left_out} more</td></tr>" if left_out > 0 else "")


def _kind(name: str) -> str:
    return " class='text'" if name in TEXT_COLUMNS else ""


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1%}" if name in SHARES else number(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
