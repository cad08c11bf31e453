import logging
import re
import socket
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256
from http import HTTPStatus
from http.client import HTTPConnection
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from machine_speed import scaled
from paceline.errors import UsageError
from paceline.watch import refusals as refusals_module
from paceline.watch.address import Address
from paceline.watch.feed import Feed
from paceline.watch.refusals import Refusals
from paceline.watch.server import PageServer
from selections import parametrize_few


@contextmanager
def served(host="127.0.0.1"):
    server = PageServer(Address(host, 0), Feed())
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def local():
    with served() as server:
        yield server


def get(server, path="/", method="GET", **headers):
    connection = HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=scaled(10))
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body.decode()


def test_the_page_comes_with_headers_that_keep_it_alone(local):
    response, body = get(local)
    assert response.status == 200
    assert body.startswith("<!doctype html>")
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    [script] = re.findall(r"<script[^>]*>(.*?)</script>", body, re.DOTALL)
    assert b64encode(sha256(script.encode()).digest()).decode() in policy


@pytest.mark.parametrize("path", ["/run.json", "/../run.json", "//etc/passwd", "/%2e%2e/events", "/events/x", "/?a"])
def test_only_two_paths_are_served(local, path):
    assert get(local, path)[0].status == (200 if path == "/?a" else 404)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD"])
def test_nothing_can_be_changed(local, method):
    assert get(local, method=method)[0].status == 501


def test_loopback_needs_no_token_but_its_own_name(local):
    assert "token" not in local.url
    port = urlsplit(local.url).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "[::1]", "127.0.0.2"):
        assert get(local, Host=host)[0].status == 200
    for host in (f"example.org:{port}", "", "[bad", "127.0.0.1.example.org"):
        assert get(local, Host=host)[0].status == 403


def test_another_address_needs_the_token_of_its_url(caplog):
    with served("0.0.0.0") as server, served("0.0.0.0") as other:
        token = urlsplit(server.url).query
        assert len(token) > len("token=") + 20
        assert urlsplit(other.url).query != token
        assert get(server, f"/?{token}", Host="example.org")[0].status == 200
        with caplog.at_level(logging.WARNING):
            for path in ("/", "/events", "/?token=", f"/?{token[:-1]}", f"/?{token}x", "/?token=%ff", f"/#{token}"):
                assert get(server, path)[0].status == 403
    assert caplog.messages == ["refused a request from 127.0.0.1: 403 Forbidden", "refused 7 requests in all"]


def test_the_url_of_all_interfaces_has_the_name_of_this_host():
    with served("0.0.0.0") as server:
        name = socket.gethostname()
        assert server.url.startswith(f"http://{name}:")
        path = server.url.partition(f"{urlsplit(server.url).port}")[2]
        assert get(server, path, Host=f"{name}:{urlsplit(server.url).port}")[0].status == 200


def test_refused_requests_are_counted_and_logged_once_a_minute(caplog, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(refusals_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(refusals_module, "MAX_LOGGED_HOSTS", 2)
    refusals = Refusals()
    for number in range(1000):
        now_s = 100.0 + 0.1 * number
        refusals.add(f"10.0.0.{number % 3}", "403 Forbidden")
    assert refusals.count == 1000
    refusals.close()
    refusals.close()
    assert caplog.messages == [
        "refused a request from 10.0.0.0: 403 Forbidden",
        "refused a request from 10.0.0.1: 403 Forbidden",
        "refused 602 requests so far, the last one from 10.0.0.1: 403 Forbidden",
        "refused 1000 requests in all",
    ]
    assert len(refusals._hosts) == 2


@pytest.mark.parametrize(("kind", "shown"), [(ConnectionResetError, 0), (ValueError, 1)])
def test_a_connection_that_the_viewer_ends_is_no_error(local, kind, shown, caplog):
    caplog.set_level(logging.INFO)
    try:
        raise kind
    except kind:
        local._server.handle_error(None, ("10.0.0.1", 1))
    assert len(caplog.messages) == shown


@parametrize_few("path", ["http://[", "//[/?token=x", "http://[::1"], keep=1)
def test_a_path_that_is_no_url_is_refused_without_a_traceback(path, caplog):
    with served("0.0.0.0") as server, socket.create_connection(("127.0.0.1", urlsplit(server.url).port), 10) as sock:
        sock.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        assert sock.recv(1000).startswith(b"HTTP/1.0 40")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/9.0", 505),
        ("DELETE /", 400),
        ("<b>\x1b[2J / HTTP/1.0", 501),
        (f"GET /{'a' * 70_000} HTTP/1.0", 414),
    ],
)
def test_what_is_no_request_is_counted_and_not_shown(request_line, status, caplog):
    with served() as server, socket.create_connection(("127.0.0.1", urlsplit(server.url).port), 10) as sock:
        sock.sendall(f"{request_line}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(1000), b"")).decode()
    assert answer.endswith(f"{HTTPStatus(status).phrase}\n")
    assert "<b>" not in answer
    assert caplog.messages == [f"refused a request from 127.0.0.1: {status} {HTTPStatus(status).phrase}"]


def test_idle_strangers_do_not_keep_viewers_out(monkeypatch):
    monkeypatch.setattr("paceline.watch.server.MOST_CONNECTIONS", 3)
    with served() as server:
        address = "127.0.0.1", urlsplit(server.url).port
        strangers = [socket.create_connection(address, 10) for _ in range(8)]
        viewer = HTTPConnection(*address, timeout=scaled(10))
        viewer.request("GET", "/events")
        assert viewer.getresponse().status == 200
        strangers += [socket.create_connection(address, 10) for _ in range(8)]
        assert get(server)[0].status == 200
        server._server.feed.close()
        assert viewer.sock is None or viewer.sock.fileno() > 0  # its connection was not ended for a stranger
        viewer.close()
        for each in strangers:
            each.close()


def test_too_many_connections_are_closed(monkeypatch, caplog):
    monkeypatch.setattr("paceline.watch.server.MOST_CONNECTIONS", 1)
    monkeypatch.setattr("paceline.watch.server.REPLACE_S", 0.01)
    with served() as server:
        waiting = HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=scaled(10))
        waiting.request("GET", "/events")
        waiting.getresponse()
        with pytest.raises(ConnectionError):
            get(server)
        server._server.feed.close()
        waiting.close()
    assert caplog.messages == ["refused a request from 127.0.0.1: 1 connections are open"]


def test_an_address_in_use_is_named(local):
    port = urlsplit(local.url).port
    with pytest.raises(
        UsageError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use; give another"
    ):
        PageServer(Address("127.0.0.1", port), Feed())


@pytest.mark.parametrize("text", ["8765", "host", "host:", "host:port", "host:70000", "host:-1"])
def test_an_invalid_address_is_refused(text):
    with pytest.raises(UsageError, match=r"expected HOST:PORT, for example 127\.0\.0\.1:8765"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "is_loopback"), [("localhost", True), ("127.1.2.3", True), ("::1", True), ("0.0.0.0", False), ("a", False)]
)
def test_loopback_addresses(host, is_loopback):
    assert Address(host).is_loopback == is_loopback
