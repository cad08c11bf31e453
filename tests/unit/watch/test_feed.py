from threading import Thread

import orjson
import pytest

from machine_speed import scaled
from paceline.watch import feed as module
from paceline.watch.feed import Feed
from paceline.watch.watcher import Watcher
from written_runs import begun, two_updates, write_run


@pytest.fixture
def clock(monkeypatch):
    """Clock of the feed, which the test moves."""

    class Clock:
        now_s = 0.0

        def monotonic(self):
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def watcher(tmp_path):
    write_run(tmp_path / "run", two_updates())
    watcher = Watcher(tmp_path / "run")
    watcher.poll()
    return watcher


def viewer(feed):
    """Return the messages for a viewer, who is there from now on."""
    messages = feed.messages()
    first = []
    thread = Thread(target=lambda: first.append(next(messages)))
    thread.start()
    with feed._changed:
        assert feed._changed.wait_for(lambda: feed._viewers, 10) or feed._viewers

    def received():
        thread.join()
        yield orjson.loads(first[0])
        yield from map(orjson.loads, messages)

    return received()


def test_nothing_is_built_without_a_viewer(watcher):
    feed = Feed()
    feed.publish(watcher)
    assert feed._sections == {}


def test_a_viewer_gets_all_sections_then_those_that_have_changed(watcher, clock):
    feed = Feed()
    received = viewer(feed)
    feed.publish(watcher)
    assert list(next(received)) == ["texts", "curves", "tasks", "state"]
    clock.now_s = 0.9
    feed.publish(watcher)
    clock.now_s = 1.1
    feed.publish(watcher)
    assert list(next(received)) == ["state"]
    watcher.records += 1
    clock.now_s = 1.7
    feed.publish(watcher)
    clock.now_s = 1.9
    feed.publish(watcher)
    assert list(next(received)) == ["texts", "curves", "tasks", "state"]
    feed.close()
    assert list(received) == []


def test_a_slow_viewer_skips_versions(watcher, clock):
    feed = Feed()
    received = viewer(feed)
    feed.publish(watcher)
    next(received)
    for second in range(1, 100):
        clock.now_s = float(second)
        feed.publish(watcher)
    assert len(feed._sections) == 4
    feed.close()
    assert len(list(received)) == 1


def test_the_last_version_is_sent_before_the_end(watcher, clock):
    feed = Feed()
    received = viewer(feed)
    feed.publish(watcher)
    next(received)
    feed.publish(watcher)
    feed.publish(watcher, is_last=True)
    feed.close()
    assert [list(message) for message in received] == [["state"]]
    feed.wait_for_viewers(timeout_s=scaled(10))
    assert feed._viewers == 0


def test_a_run_without_updates_has_its_state(tmp_path, clock):
    write_run(tmp_path / "run", [begun()])
    watcher, feed = Watcher(tmp_path / "run"), Feed()
    received = viewer(feed)
    feed.publish(watcher)
    assert next(received)["state"]["text"].startswith("waiting for the first record in")
    watcher.poll()
    clock.now_s = 1.0
    feed.publish(watcher)
    assert next(received)["state"]["headline"] == "made up with bsp: no update yet"
