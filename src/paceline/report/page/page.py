"""HTML page of the report, with style, script and data in one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from paceline.report.curves import Group
from paceline.report.page import parts as html_parts
from paceline.report.page.data import page_json
from paceline.report.run_data import RunData
from paceline.report.summary_table import headline

# In the order of their imports.
SCRIPTS = (
    *("format", "scale", "ink", "unpack", "work", "chart"),
    *("curves", "timeline", "strips", "heat", "histogram", "main"),
)


def page(runs: Sequence[RunData], groups: Sequence[Group]) -> str:
    """Return the report of these runs as HTML that needs no network."""
    several = any(len(group.runs) > 1 for group in groups)
    sentence = headline(groups)
    parts = {
        "title": escape(f"paceline: {sentence}"),
        "headline": escape(sentence),
        "metric_charts": html_parts.metric_charts(groups),
        "stragglers": html_parts.straggler_sentences(runs),
        "notices": html_parts.notices(runs),
        "table": html_parts.run_table(runs),
        "configuration": html_parts.configuration(runs),
        "decisions": html_parts.decisions(runs),
        "seconds": html_parts.seconds_section(runs),
        "samples": html_parts.samples_section(runs),
        "fate_legend": html_parts.fate_legend(),
        "run_options": html_parts.run_options(runs),
        "progress_caption": escape(_caption(runs, several)),
        "style": _source("style.css"),
        "script": script(),
        "data": page_json(runs, groups),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


def script() -> str:
    """Return the modules of the page as one script, without imports and exports."""
    joined = "\n".join(_source(f"{name}.js") for name in SCRIPTS)
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", joined, flags=re.MULTILINE), flags=re.MULTILINE)


def _caption(runs: Sequence[RunData], several: bool) -> str:
    windows = sorted({run.loss_window for run in runs})
    gradients = " or ".join(map(str, windows))
    text = f"The loss is the mean over the last {gradients} gradients, as in Stop(loss=)."
    if several:
        text += " Lines are means over the runs of a protocol, bands go from the smallest to the largest value;"
        text += " both end with the shortest run."
    return text


def _source(name: str) -> str:
    return files("paceline.report").joinpath("page", name).read_text(encoding="utf-8")
