"""The watch for spot notices, against a server that answers like the clouds."""

import logging
import queue
import threading
from logging.handlers import QueueHandler

import pytest

from machine_speed import scaled
from metadata_server import MetadataServer
from paceline.engines import notice_watch
from paceline.engines.notice_watch import MOST_BYTES, NoticeWatch

LIMIT_S = scaled(10)
CLOUDS = {
    "aws": "AWS will terminate this machine at 2017-09-18T08:22:00+00:00",
    "gcp": "Google Cloud preempts this machine",
    "azure": "Azure preempts this machine at 2016-09-19T18:29:47+00:00",
}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(notice_watch, "POLL_S", 0.005)


@pytest.fixture
def server():
    with MetadataServer() as running:
        yield running


def ask_again(server):
    """Wait until the server has answered a request that comes from now on."""
    for _ in range(2):  # the first one may be under way
        server.asked.clear()
        assert server.asked.wait(LIMIT_S)


@pytest.mark.parametrize(("cloud", "text"), CLOUDS.items())
def test_the_notice_of_a_cloud_is_reported_once(cloud, text, server, caplog):
    notices = queue.SimpleQueue()
    with NoticeWatch(f"{cloud}@{server.address}", notices.put):
        ask_again(server)
        assert notices.empty()
        server.is_preempted = True
        assert notices.get(timeout=LIMIT_S) == text
    assert notices.empty()
    assert caplog.records == []


def test_a_file_is_a_notice(tmp_path):
    notices = queue.SimpleQueue()
    place = tmp_path / "preempt"
    with NoticeWatch(str(place), notices.put):
        place.touch()
        assert notices.get(timeout=LIMIT_S) == f"{place} exists"


def test_a_folder_is_no_notice(tmp_path):
    notices, logged = queue.SimpleQueue(), QueueHandler(queue.SimpleQueue())
    logging.getLogger(notice_watch.__name__).addHandler(logged)
    place = tmp_path / "preempt"
    place.mkdir()
    with NoticeWatch(str(place), notices.put):
        record = logged.queue.get(timeout=LIMIT_S)
        assert f"notice={place} cannot be read (it is a folder, not a file)" in record.getMessage()
        assert notices.empty()
        place.rmdir()
        place.touch()
        assert notices.get(timeout=LIMIT_S) == f"{place} exists"
    logging.getLogger(notice_watch.__name__).removeHandler(logged)


BAD = [
    (500, {}, ""),
    (302, {"Location": "/computeMetadata/v1/instance/preempted"}, ""),  # which is not followed
    (200, {}, b"TRUE" + b" " * MOST_BYTES),
    (200, {"Content-Length": None}, b"TRUE" + b" " * MOST_BYTES),
    (200, {"Content-Length": "99999999999999"}, b"TRUE"),
    (200, {"Content-Length": "100"}, b"TRUE"),
    (200, {"X": "y" * 100_000}, b"TRUE"),
]


@pytest.mark.parametrize("answer", BAD)
def test_a_bad_answer_is_logged_once_and_no_notice(answer, server, caplog):
    notices = queue.SimpleQueue()
    server.answer = answer
    with NoticeWatch(f"gcp@{server.address}", notices.put):
        ask_again(server)
        ask_again(server)
        assert notices.empty()
        server.answer, server.is_preempted = None, True
        assert notices.get(timeout=LIMIT_S) == CLOUDS["gcp"]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"notice=gcp@{server.address} cannot be read (" in record.getMessage()


def test_a_token_cannot_add_a_header(server, caplog):
    notices = queue.SimpleQueue()
    server.answer = 200, {}, "token\r\nX-Other: 1"
    with NoticeWatch(f"aws@{server.address}", notices.put):
        ask_again(server)
    assert notices.empty()
    assert "Invalid header value" in caplog.text


def test_no_proxy_is_asked(server, monkeypatch):
    notices = queue.SimpleQueue()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.is_preempted = True
    with NoticeWatch(f"gcp@{server.address}", notices.put):
        assert notices.get(timeout=LIMIT_S) == CLOUDS["gcp"]


def test_an_answer_after_the_end_of_the_watch_is_no_notice(server):
    is_asked, may_answer = threading.Event(), threading.Event()

    def respond(*request):
        is_asked.set()
        assert may_answer.wait(LIMIT_S)
        return 200, {}, "TRUE"

    server.respond = respond
    notices = queue.SimpleQueue()
    with NoticeWatch(f"gcp@{server.address}", notices.put):
        assert is_asked.wait(LIMIT_S)
        [watch] = [each for each in threading.enumerate() if each.name == "paceline-notice"]
    may_answer.set()
    watch.join(LIMIT_S)
    assert not watch.is_alive()
    assert notices.empty()
