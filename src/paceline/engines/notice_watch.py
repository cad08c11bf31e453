"""Watch for spot notices: a thread that asks a metadata service, or looks for a file, every two seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import MsgspecError

from paceline.clusters.spot_notice import Answer, parse_notice
from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
POLL_S = 2.0
TIMEOUT_S = 2.0
MOST_BYTES = 1 << 16
# OverflowError: a year or a port that is too large. RecursionError: nested brackets.
FAILURES = (OSError, HTTPException, ValueError, OverflowError, MsgspecError, RecursionError)


class NoticeWatch:
    """Watch for the notice that this machine will be taken away.

    A source that fails is logged once and asked again.

    Args:
        notice: source of notices, as in `Torchrun`; None for none.
        on_notice: callback with the notice in text, called at most once, in the thread of the watch.
    """

    def __init__(self, notice: str | None, on_notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._on_notice = on_notice
        self._closing = threading.Lock()
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        """Start the watch."""
        self.start()
        return self

    def start(self) -> None:
        """Start the watch."""
        if self._notice is not None:
            look = partial(_look, self._notice)
            threading.Thread(target=self._watch, args=(look,), daemon=True, name="paceline-notice").start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close the watch."""
        self.close()

    def close(self) -> None:
        """End the watch; the callback is not called any more. A request that waits for its answer ends later."""
        with self._closing:
            self._is_closed.set()

    def _watch(self, look: Callable[[], str]) -> None:
        has_failed = False
        while not self._is_closed.is_set():
            try:
                found = look()
            except FAILURES as error:
                if not has_failed:
                    LOG.warning("notice=%s cannot be read (%s): the run continues, and asks again", self._notice, error)
                has_failed, found = True, ""
            if found:
                with self._closing:
                    if not self._is_closed.is_set():
                        self._on_notice(found)
                return
            self._is_closed.wait(POLL_S)


def _look(notice: str) -> str:
    """Return the notice of a source in text; empty without a notice."""
    source = parse_notice(notice)
    if isinstance(source, Path):
        if source.is_dir():
            raise IsADirectoryError("it is a folder, not a file")
        return f"{source} exists" if source.is_file() else ""
    return source.look(partial(_ask, source.address))


def _ask(address: str, method: str, path: str, headers: Mapping[str, str]) -> Answer:
    """Send a request without a proxy, and without following redirects."""
    connection = HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers=dict(headers))
        response = connection.getresponse()
        body = response.read(MOST_BYTES + 1)
        if len(body) > MOST_BYTES or response.length:
            raise ValueError(f"the answer has more than {MOST_BYTES} bytes, or fewer than it announces")
    finally:
        connection.close()
    return Answer(response.status, body)
