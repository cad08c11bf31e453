"""Metrics of a run for Prometheus, and its health."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Self

from paceline.errors import UsageError
from paceline.recording.callback import RunInfo
from paceline.recording.metrics.exporter import MetricsExporter
from paceline.recording.metrics.http_server import MetricsServer, Page
from paceline.recording.metrics.registry import METRICS
from paceline.utils.argument_types import checked_types
from paceline.utils.rank_logger import RankLogger
from paceline.utils.validation import check_range

LOG = RankLogger(__name__)
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED = {"le", *(metric.label for metric in METRICS if metric.label)}


@checked_types
class Prometheus(MetricsExporter):
    """Callback that serves the metrics of a run to Prometheus at ``/metrics``, and its health at ``/health``.

    A thread of rank 0 answers from the start of the run to its end. ``/health`` answers 200 while the latest update is
    recent, and else 503 with the reason.

    Args:
        port: port to listen on, 0 to 65535; 0 for a free one.
        host: address to listen on; other machines reach "0.0.0.0", and every process that does may read the metrics.
        labels: labels that all metrics of this run have.
        stale_after_s: seconds without an update after which ``/health`` answers 503, > 0.

    Attributes:
        url: address of the server while the run is under way.

    Raises:
        UsageError: prometheus-client is not installed, a label is invalid, or the port is in use.
    """

    def __init__(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        labels: Mapping[str, str] | None = None,
        stale_after_s: float = 300.0,
    ) -> None:
        check_range("[0, 65535]", port=port)
        check_range("(0, inf)", stale_after_s=stale_after_s)
        try:
            from paceline.recording.metrics.prometheus_page import PrometheusPage
        except ImportError as error:
            raise UsageError("prometheus-client is not installed; run: pip install 'paceline[metrics]'") from error
        self._page = PrometheusPage
        self._labels = _checked_labels(labels or {})
        self._address = host, port
        self._stale_after_s = stale_after_s
        self._server: MetricsServer | None = None
        self._started_s = 0.0
        self.url = ""

    @classmethod
    def parse(cls, metrics: str) -> Self:
        """Return the callback for an address in text: PORT of 127.0.0.1, or HOST:PORT.

        Raises:
            UsageError: the text is no address, or as for the class.
        """
        host, _, port = metrics.rpartition(":")
        if not port.isdecimal():
            raise UsageError(f"metrics={metrics!r}, expected PORT or HOST:PORT, for example metrics='9464'")
        return cls(int(port), host=host.strip("[]") or "127.0.0.1")

    def on_start(self, run: RunInfo) -> None:
        """Start the server."""
        super().on_start(run)
        self._started_s = time.time()
        host, port = self._address
        metrics = self._page(self.run, self._labels)
        try:
            self._server = MetricsServer(host, port, {"/metrics": metrics, "/health": self._health})
        except OSError as error:
            raise UsageError(
                f"metrics cannot be served at {host}:{port} ({error.strerror}); give a free port of this host, for "
                "example 9465"
            ) from error
        self.url = self._server.url
        LOG.info("metrics at %s/metrics", self.url)

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _health(self, accepted: str) -> Page:
        silent_s = time.time() - max(self._started_s, self.run.updated_s)
        if silent_s <= self._stale_after_s:
            return Page(b"ok\n")
        reason = f"no update for {silent_s:.0f} s, more than stale_after_s={self._stale_after_s:g}\n"
        return Page(reason.encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the labels.

    Raises:
        UsageError: the name of a label is invalid, or that of a label of a metric.
    """
    for name in labels:
        if not LABEL_NAME.fullmatch(name):
            raise UsageError(f"labels: {name!r} is not a name of letters, digits and _, as in labels={{'run': 'a'}}")
        if name in RESERVED:
            raise UsageError(f"labels: {name!r} is a label of paceline's own metrics; give it another name")
    return dict(labels)
