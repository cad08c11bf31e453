"""HTML page of the live view, with its style and script."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from paceline.report.page import page as report_page
from paceline.report.page.parts import fate_legend


class LivePage(NamedTuple):
    """Page, and the policy that lets only its own script run."""

    html: bytes
    content_security_policy: str


def live_page() -> LivePage:
    """Return the page, which is the same for all runs."""
    charts = [report_page.source(f"{name}.js") for name in report_page.CHARTS]
    script = report_page.joined(*[*charts, _source("live.js")])
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = {
        "default-src": "'none'",
        "script-src": f"'sha256-{digest}'",
        "style-src": "'unsafe-inline'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    html = report_page.framed(
        "paceline watch",
        report_page.filled(_source("watch.html"), {"fate_legend": fate_legend()}),
        style=report_page.source("style.css") + _source("watch.css"),
        scripts=f'<script type="module">{script}</script>',
    )
    return LivePage(html.encode(), "; ".join(f"{name} {value}" for name, value in policy.items()))


def _source(name: str) -> str:
    return files("paceline.watch").joinpath("page", name).read_text(encoding="utf-8")
