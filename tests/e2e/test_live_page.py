"""The live page in a real browser: it follows a run that writes, stops, is resumed, ends, or is killed."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from chromium import NEEDS_CHROMIUM
from paceline.core.records import DecisionMade, VersionEvaluated
from paceline.recording.run_folder import RunFolder
from paceline.watch.address import Address
from paceline.watch.feed import Feed
from paceline.watch.follow import follow
from paceline.watch.server import PageServer
from paceline.watch.watcher import Watcher
from written_runs import CONFIGURATION, arrival, begun, ended, update

pytestmark = NEEDS_CHROMIUM
HOSTILE = "</td><img src=x onerror='window.broken = true'><script>window.broken = true</script>"


@contextmanager
def page_of(folder):
    """Serve the page of a run in threads of this process and yield its URL."""
    feed, is_over = Feed(), Event()
    server = PageServer(Address(port=0), feed)
    server.start()
    thread = Thread(target=follow, args=(Watcher(folder), feed, is_over.is_set), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        is_over.set()
        thread.join()
        server.close()


@pytest.fixture
def open_page(browser):
    """Function that opens a page, which must have caused no error at the end."""
    pages, troubles = [], []

    def opened(url, **options):
        page = browser.new_context(viewport={"width": 1280, "height": 900}, **options).new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if is_trouble(message) else None)
        page.goto(url)
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert troubles == []


def is_trouble(message):
    """Say whether a message is an error, other than that the server has gone, after which the page tries again."""
    return message.type == "error" and "net::ERR_" not in message.text


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr("paceline.watch.watcher.QUIET_S", 0.1)
    monkeypatch.setattr("paceline.watch.follow.FINAL_S", 0.5)


class Writer:
    """Writer of an invented run with two workers."""

    def __init__(self, folder, **options):
        self.folder = RunFolder(folder, {**CONFIGURATION, "job": HOSTILE}, **options)
        self.updates = 0

    def begin(self):
        self.folder.on_record(begun())
        self.folder.on_record(DecisionMade(now_s=0.0, kind="protocol", reason=f"bsp: {HOSTILE}"))

    def update(self, times=1):
        for _ in range(times):
            self.updates += 1
            number, now_s = self.updates, 4.0 * self.updates
            self.folder.on_record(arrival(0, number, now_s - 4, now_s - 3, version=number - 1, loss=1 / number))
            self.folder.on_record(arrival(1, number, now_s - 4, now_s, version=number - 1, loss=1 / number))
            self.folder.on_record(update(number, now_s, loss=1 / number))
        self.folder.settle()


def wait_for_updates(page, count):
    page.get_by_role("heading", level=1).filter(has_text=re.compile(rf": {count} updates? in")).wait_for()


def wait_for_state(page, state):
    page.wait_for_selector(f"html[data-state={state}]", state="attached")


def ink(page, chart):
    """Return what a chart shows, after it has drawn again if it is going to."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(f"document.querySelector('#{chart} canvas').toDataURL()")


@pytest.mark.slow
def test_the_page_follows_a_run_that_writes_stops_and_is_resumed(open_page, tmp_path):
    folder = tmp_path / "run"
    with page_of(folder) as url:
        page = open_page(url)
        wait_for_state(page, "waiting")
        writer = Writer(folder)
        writer.begin()
        writer.update()
        wait_for_updates(page, 1)
        page.wait_for_selector("#timeline canvas")
        writer.update(4)
        wait_for_updates(page, 5)
        wait_for_state(page, "running")
        kept, before = writer.folder.settle(), ink(page, "loss")
        writer.update(3)
        wait_for_updates(page, 8)
        assert ink(page, "loss") != before
        writer.folder.close()
        wait_for_state(page, "stopped")

        resumed = Writer(folder, keep=kept)
        resumed.updates = 5
        resumed.update()
        wait_for_updates(page, 6)
        wait_for_state(page, "running")
        resumed.folder.on_record(VersionEvaluated(now_s=24.0, version=6, published_s=24.0, metrics={"accuracy": 0.5}))
        resumed.folder.on_record(ended(24.0, 48.0))
        resumed.folder.settle()
        wait_for_state(page, "ended")
        page.wait_for_selector("#accuracy canvas")
        resumed.folder.close()
        assert "updates made" in page.locator("#state").inner_text()
        assert HOSTILE in page.locator("#decisions").inner_text()
        assert not page.evaluate("window.broken")
    assert page.locator("html").get_attribute("data-state") == "ended"


def test_the_page_has_the_charts_and_tables_of_the_report(open_page, tmp_path):
    writer = Writer(tmp_path / "run")
    writer.begin()
    writer.update(30)
    with page_of(tmp_path / "run") as url:
        page = open_page(url, color_scheme="dark")
        for chart in ("loss", "k", "timeline", "round-trips", "heat", "staleness"):
            page.wait_for_selector(f"#{chart} canvas")
        ink(page, "k")
        page.locator("#k canvas").hover(position={"x": 700, "y": 60})
        assert "k = 2, quorum of 2 reached" in page.locator("#k .tip").inner_text()
        page.locator("#timeline canvas").hover(position={"x": 700, "y": 60})
        assert re.match(r"worker 1, draw \d+: used", page.locator("#timeline .tip").inner_text())
        assert "computing 63.3%, waiting 36.7%" in page.locator("#bars").inner_text()
        assert "720 B" in page.locator("#table").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        drawn = ink(page, "loss")
        page.get_by_role("button", name="Dark/light").click()
        assert ink(page, "loss") != drawn
    writer.folder.close()


@pytest.mark.slow
def test_the_page_says_that_its_server_is_gone(open_page, tmp_path):
    writer = Writer(tmp_path / "run")
    writer.begin()
    writer.update(2)
    with page_of(tmp_path / "run") as url:
        page = open_page(url)
        wait_for_updates(page, 2)
    wait_for_state(page, "lost")
    assert page.locator("#state").inner_text().startswith("no connection to the server: this is the last known state")
    writer.folder.close()


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_the_page_of_train_serve_shows_how_the_run_ends(open_page, tmp_path, ending):
    command = ["-m", "paceline", "--quiet", "train", "digits", "--protocol", "bsp", "--cluster", "local:2"]
    options = ["--stop", "seconds=600", "--out", tmp_path / "run", "--serve", "--address", ":0"]
    run = subprocess.Popen([sys.executable, *command, *options], stderr=subprocess.PIPE, text=True)
    page = open_page(re.search(r"http://\S+", run.stderr.readline())[0])
    wait_for_state(page, "running")
    page.wait_for_selector("#loss canvas")
    os.kill(run.pid, ending)
    wait_for_state(page, "stopped" if ending == signal.SIGKILL else "ended")
    with run:
        rest = run.stderr.read()
    assert "Traceback" not in rest
