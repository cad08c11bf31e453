"""One line that says how a run is doing: redrawn on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paceline.callbacks.base import Callback
from paceline.history import Record, RunEnded, RunStarted, UpdateMade, VersionEvaluated, WorkerLost
from paceline.stop import Stop

REDRAW_S = 0.1
PLAIN_LINE_S = 10.0


class ProgressLine(Callback):
    """Shows updates, loss, accuracy and speed of one run.

    Args:
        title: what stands before everything else.
        stop: whose target loss is shown beside the loss.
        console: where to draw.
    """

    def __init__(self, title: str, stop: Stop, console: Console) -> None:
        self._title = title
        self._target = f" (target {stop.loss:g})" if stop.loss is not None else ""
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._interval_s = REDRAW_S if self._live else PLAIN_LINE_S
        self._drawn_s = time.monotonic()
        self._accuracy = ""
        self._loss: float | None = None
        self._latest = f"{title}  starting"

    def __enter__(self) -> Self:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
            self._live.update(Text(self._latest), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave the last line standing."""
        if self._live is not None:
            self._live.stop()

    def on_record(self, record: Record) -> None:
        """Hear of the beginning and of lost workers too."""
        match record:
            case RunStarted():
                self._say(record.memory)
            case WorkerLost():
                self._say(f"worker {record.worker} lost: {record.reason}")
        super().on_record(record)

    def on_update(self, update: UpdateMade) -> None:
        """Redraw, not too often."""
        known = update.loss == update.loss
        if known:
            self._loss = update.loss if self._loss is None else 0.9 * self._loss + 0.1 * update.loss
        loss = f"  loss {self._loss:.4f}{self._target}" if self._loss is not None else ""
        speed = f"  {update.version / update.now_s:.1f} updates/s" if update.now_s else ""
        self._latest = f"{self._title}  {update.now_s:.1f} s  {update.version} updates{loss}{self._accuracy}{speed}"
        if time.monotonic() - self._drawn_s >= self._interval_s:
            self._draw()

    def on_evaluate(self, evaluation: VersionEvaluated) -> None:
        """Remember the accuracy."""
        if "accuracy" in evaluation.metrics:
            self._accuracy = f"  accuracy {evaluation.metrics['accuracy']:.3f}"

    def on_end(self, end: RunEnded) -> None:
        """Say why it ended."""
        self._latest = f"{self._title}  {end.now_s:.1f} s  {end.reason}{self._accuracy}"
        self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        if self._live is not None:
            self._live.update(Text(self._latest, overflow="ellipsis", no_wrap=True), refresh=True)
        else:
            self._console.print(self._latest, highlight=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(Text(f"{self._title}  {text}"), soft_wrap=True)
