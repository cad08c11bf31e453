"""HTTP server of pages: errors are answered and logged, and no client ends it."""

import socket
import urllib.request
from contextlib import ExitStack, closing
from urllib.error import HTTPError

import pytest

from machine_speed import scaled
from paceline.recording.metrics.http_server import MAX_CONNECTIONS, MetricsServer, Page
from this_process import wait_until


def fail(accepted):
    raise ZeroDivisionError


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request):
    try:
        made = MetricsServer(request.param, 0, {"/page": lambda accepted: Page(accepted.encode()), "/failing": fail})
    except OSError:
        pytest.skip(f"this machine has no {request.param}")
    with closing(made):
        yield made


def get(server, path):
    request = urllib.request.Request(server.url + path, headers={"Accept": "text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=scaled(20)) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


def test_a_page_is_answered_with_and_without_a_query(server):
    assert get(server, "/page") == get(server, "/page?a=b") == (200, b"text/plain")


def test_an_unknown_path_names_the_pages(server):
    assert get(server, "/") == (404, b"no such page; there is /page and /failing\n")


def test_a_page_that_fails_is_logged_and_the_next_is_answered(server, caplog):
    assert get(server, "/failing") == (500, b"internal error; see the log of the run\n")
    assert "/failing cannot be served; the run continues" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert get(server, "/page")[0] == 200


def test_a_client_that_sends_nothing_delays_no_other(server):
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port))):
        assert get(server, "/page")[0] == 200


def test_connections_without_end_take_a_bounded_number_of_threads(server):
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with ExitStack() as opened:
        for _ in range(MAX_CONNECTIONS):
            opened.enter_context(socket.create_connection((host.strip("[]"), int(port))))
        with pytest.raises(OSError, match=r"closed|reset"):
            get(server, "/page")
    wait_until(lambda: is_answered(server))


def is_answered(server):
    try:
        return get(server, "/page")[0] == 200
    except OSError:
        return False


def test_a_closed_server_refuses_connections(server):
    server.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(server.url)
