"""Sections of the live page: built by the follower of a run, sent by the connections of the viewers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from threading import Condition
from typing import Any, NamedTuple

import orjson

from paceline.utils.files import in_unicode
from paceline.watch.live_view import LiveView
from paceline.watch.watcher import Watcher

SHORTEST_S = 0.5  # between two versions, while a long log is read

# Content of each section of a run with records.
CONTENT: Mapping[str, Callable[[LiveView], Mapping[str, Any]]] = {
    "texts": LiveView.texts,
    "curves": LiveView.curves,
    "tasks": LiveView.tasks,
}


class _Version(NamedTuple):
    """Version of a section."""

    number: int
    json: bytes


class Feed:
    """Latest version of each section. A slow viewer skips versions; nothing is queued for it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._sections: dict[str, _Version] = {}
        self._number = 0
        self._records = -1  # in the latest version
        self._built_s = -inf
        self._viewers = 0
        self._is_closed = False

    def publish(self, watcher: Watcher, *, is_last: bool = False) -> None:
        """Build the sections that have changed, if there is a viewer and it is time.

        Args:
            watcher: follower of the run.
            is_last: whether no other version follows.
        """
        has_changed, now_s = watcher.records != self._records, time.monotonic()
        if not self._viewers or (now_s - self._built_s < SHORTEST_S and not is_last):
            return
        self._records = watcher.records
        self._built_s = now_s
        built = _sections(watcher, whole=has_changed)
        with self._changed:
            self._number += 1
            self._sections |= {name: _Version(self._number, json) for name, json in built.items()}
            self._changed.notify_all()

    def close(self) -> None:
        """End the iteration of every viewer after the versions that are there."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_for_viewers(self, timeout_s: float) -> None:
        """Wait until the last versions have been sent to all viewers, after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._viewers, timeout_s)

    def messages(self) -> Generator[bytes]:
        """Yield messages for one viewer: JSON objects with the sections that are new since the last one."""
        with self._viewing():
            seen = 0
            while True:
                new, newest = self._newer_than(seen)
                if newest == seen:
                    return
                seen = newest
                yield b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), json) for name, json in new.items())

    def _newer_than(self, seen: int) -> tuple[dict[str, bytes], int]:
        """Wait for newer versions and return them with the newest number, or none after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > seen or self._is_closed)
            new = {name: version.json for name, version in self._sections.items() if version.number > seen}
            return new, self._number

    @contextmanager
    def _viewing(self) -> Iterator[None]:
        with self._changed:
            self._viewers += 1
        try:
            yield
        finally:
            with self._changed:
                self._viewers -= 1
                self._changed.notify_all()


def _sections(watcher: Watcher, *, whole: bool) -> dict[str, bytes]:
    """Return the JSON of the state, and of all other sections if there are new records; nan becomes null."""
    view = LiveView(watcher.live) if watcher.live is not None else None
    contents = {name: content(view) for name, content in CONTENT.items()} if view and whole else {}
    headline = view.headline if view else in_unicode(str(watcher.folder))
    contents["state"] = {"state": watcher.state, "text": watcher.describe(), "headline": headline}
    return {name: orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY) for name, content in contents.items()}
