"""HTML page of the report, with style, script and data in one file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

from paceline.report.curves import Group
from paceline.report.page import parts as html_parts
from paceline.report.page.data import page_json
from paceline.report.run_data import RunData
from paceline.report.summary_table import headline, row

# In the order of their imports.
CHARTS = (
    *("format", "scale", "ink", "theme", "unpack", "work", "chart"),
    *("curves", "timeline", "strips", "heat", "shares", "histogram"),
)
SCRIPTS = (*CHARTS, "main")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[RunData], groups: Sequence[Group]) -> str:
    """Return the report of these runs as HTML that needs no network."""
    several = any(len(group.runs) > 1 for group in groups)
    sentence = headline(groups)
    parts = {
        "headline": escape(sentence),
        "metric_charts": html_parts.metric_charts(groups),
        "stragglers": html_parts.straggler_sentences(runs),
        "notices": html_parts.notices(runs),
        "table": html_parts.run_table([row(run) for run in runs]),
        "configuration": html_parts.configuration(runs),
        "decisions": html_parts.decisions(runs),
        "waiting": html_parts.waiting_section(runs),
        "seconds": html_parts.seconds_section(runs),
        "samples": html_parts.samples_section(runs),
        "losses": html_parts.losses_section(runs),
        "fate_legend": html_parts.fate_legend(),
        "run_options": html_parts.run_options(runs),
        "progress_caption": escape(_caption(runs, several)),
    }
    return framed(
        f"paceline: {sentence}",
        filled(source("page.html"), parts),
        head=f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        style=source("style.css"),
        scripts=f'<script type="application/json" id="data">{page_json(runs, groups)}</script>\n'
        f'<script type="module">\n{script()}\n</script>',
    )


def framed(title: str, body: str, *, style: str, scripts: str, head: str = "") -> str:
    """Return a whole page, of the report or of the live view.

    Args:
        title: title, as text.
        body: header and sections, as HTML.
        style: style sheet.
        scripts: elements with scripts and their data.
        head: more elements of the head.
    """
    parts = {"title": escape(title), "body": body, "style": style, "scripts": scripts, "head": head}
    return filled(source("frame.html"), parts)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Return a page in which each name in double braces is replaced by its part."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def script() -> str:
    """Return the modules of the page as one script."""
    return joined(*(source(f"{name}.js") for name in SCRIPTS))


def joined(*modules: str) -> str:
    """Return modules, each after those that it imports, as one script without imports and exports."""
    text = "\n".join(modules)
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)


def _caption(runs: Sequence[RunData], several: bool) -> str:
    windows = sorted({run.loss_window for run in runs})
    gradients = " or ".join(map(str, windows))
    text = f"The loss is the mean over the last {gradients} gradients, as in Stop(loss=)."
    if several:
        text += " Lines are means over the runs of a protocol, bands go from the smallest to the largest value;"
        text += " both end with the shortest run."
    return text


def source(name: str) -> str:
    """Return the text of a file of the page."""
    return files("paceline.report").joinpath("page", name).read_text(encoding="utf-8")
