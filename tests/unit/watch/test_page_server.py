import logging
import re
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from paceline.errors import UsageError
from paceline.watch.address import Address
from paceline.watch.feed import Feed
from paceline.watch.server import PageServer


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
    connection = HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=10)
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
    assert caplog.messages == ["refused a request from 127.0.0.1: 403 Forbidden"] * 7


def test_too_many_connections_are_closed(monkeypatch, caplog):
    monkeypatch.setattr("paceline.watch.server.MOST_CONNECTIONS", 1)
    with served() as server:
        waiting = HTTPConnection("127.0.0.1", urlsplit(server.url).port, timeout=10)
        waiting.request("GET", "/events")
        waiting.getresponse()
        with pytest.raises(ConnectionError):
            get(server)
        server._server.feed.close()
        waiting.close()
    assert caplog.messages == ["closed a connection from 127.0.0.1: 1 are open"]


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
