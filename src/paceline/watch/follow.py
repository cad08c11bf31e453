"""Loop that follows a run and publishes its page."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.watch.feed import Feed
from paceline.watch.watcher import State, Watcher

POLL_S = 0.7  # with the drawing, a record is in the page within a second
FINAL_S = 5.0  # longest wait for the end of a run whose process is gone, and for its viewers


def follow(watcher: Watcher, feed: Feed, has_ended: Callable[[], bool]) -> None:
    """Follow a run until a condition holds, then publish its last state and close the feed.

    Args:
        watcher: follower of the run.
        feed: sections of the page.
        has_ended: condition, tested at each poll.
    """
    while not has_ended():
        _step(watcher, feed)
    until_s = time.monotonic() + FINAL_S
    while watcher.state not in (State.ENDED, State.STOPPED) and time.monotonic() < until_s:
        _step(watcher, feed)
    feed.publish(watcher, is_last=True)
    feed.close()
    feed.wait_for_viewers(FINAL_S)


def _step(watcher: Watcher, feed: Feed) -> None:
    is_behind = watcher.poll()
    feed.publish(watcher)
    if not is_behind:
        time.sleep(POLL_S)
