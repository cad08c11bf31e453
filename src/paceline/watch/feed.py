"""Sections of the live page: built by the follower of a run, sent by the connections of the viewers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from threading import Condition
from typing import Any, NamedTuple

import orjson

from paceline.watch.live_view import LiveView
from paceline.watch.watcher import Watcher

# Seconds between two versions of a section, at least, and its content; the page draws them in this order. A record is
# in the page after this time, a poll and the drawing: within a second.
SECTIONS: Mapping[str, tuple[float, Callable[[LiveView, Watcher], Mapping[str, Any]]]] = {
    "texts": (0.7, lambda view, watcher: view.texts()),
    "curves": (0.5, lambda view, watcher: view.curves()),
    "tasks": (0.7, lambda view, watcher: view.tasks()),
    "state": (0.5, lambda view, watcher: {**_state(watcher), "headline": view.headline}),
}
STATE_S = 1.0  # between two states of a run without new records


class _Version(NamedTuple):
    """Version of a section."""

    number: int
    records: int
    built_s: float
    json: bytes


class Feed:
    """Latest version of each section. A slow viewer skips versions; nothing is queued for it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._sections: dict[str, _Version] = {}
        self._number = 0
        self._viewers = 0
        self._is_closed = False

    def publish(self, watcher: Watcher, *, is_last: bool = False) -> None:
        """Build the sections that have changed, if there is a viewer.

        Args:
            watcher: follower of the run.
            is_last: whether no other version follows.
        """
        if self._viewers:
            built = self._build(watcher, is_last=is_last)
            with self._changed:
                self._number += bool(built)
                for name, content in built.items():
                    json = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
                    self._sections[name] = _Version(self._number, watcher.records, time.monotonic(), json)
                self._changed.notify_all()

    def _build(self, watcher: Watcher, *, is_last: bool) -> dict[str, Mapping[str, Any]]:
        now_s = time.monotonic()
        if watcher.live is None:
            is_due = self._age_s("state", now_s) >= STATE_S
            return {"state": {**_state(watcher), "headline": str(watcher.folder)}} if is_due else {}
        view = LiveView(watcher.live)
        built: dict[str, Mapping[str, Any]] = {}
        for name, (interval_s, content) in SECTIONS.items():
            has_changed = name not in self._sections or self._sections[name].records != watcher.records
            wanted_s = interval_s if has_changed else STATE_S if name == "state" else inf
            if self._age_s(name, now_s) >= (0.0 if is_last else wanted_s):
                built[name] = content(view, watcher)
        return built

    def _age_s(self, name: str, now_s: float) -> float:
        return now_s - self._sections[name].built_s if name in self._sections else inf

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
            sections = [(name, self._sections[name]) for name in SECTIONS if name in self._sections]
            return {name: each.json for name, each in sections if each.number > seen}, self._number

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


def _state(watcher: Watcher) -> dict[str, Any]:
    return {"state": watcher.state, "text": watcher.describe()}
