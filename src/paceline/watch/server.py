"""HTTP server of the live page: the page at /, and its server-sent events at /events; read-only."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import sys
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.errors import UsageError
from paceline.watch.address import Address
from paceline.watch.feed import Feed
from paceline.watch.page.page import live_page
from paceline.watch.refusals import Refusals

TIMEOUT_S = 20.0  # of a viewer that does not take what is sent
MOST_CONNECTIONS = 64
POLL_S = 0.05  # between two looks whether to stop: the end of a run waits for it
REPLACE_S = 1.0  # for a connection that is ended for a new one
LOG = logging.getLogger("paceline")


class PageServer:
    """Server with a thread for each connection.

    Only two paths are served, and no file is opened for a request. An address that other hosts can reach needs a token,
    which is in the URL of the page.

    Args:
        address: address to listen at.
        feed: sections of the page.

    Attributes:
        url: URL of the page, with the token if there is one; an address of all interfaces has the name of this host.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, address: Address, feed: Feed) -> None:
        try:
            self._server = _Server(address, feed)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {address}: {error.strerror or error}; give another address, for example address=':0'"
            ) from error
        token = f"/?token={self._server.token}" if self._server.token else ""
        host = socket.gethostname() if address.is_wildcard else address.host
        self.url = f"http://{Address(host, self._server.server_address[1])}{token}"
        self._thread = Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="paceline page server", daemon=True
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that are open end with the feed."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server.refusals.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: Address, feed: Feed) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.feed = feed
        self.page = live_page()
        self.token = None if address.is_loopback else secrets.token_urlsafe(16)
        self.refusals = Refusals()
        self.free_connections = BoundedSemaphore(MOST_CONNECTIONS)
        self._strangers: dict[Any, None] = {}  # sockets without an allowed request yet, the oldest first
        self._lock = Lock()
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.free_connections.acquire(blocking=False):
            self._end_oldest_stranger()
            if not self.free_connections.acquire(timeout=REPLACE_S):
                self.shutdown_request(request)
                self.refusals.add(client_address[0], f"{MOST_CONNECTIONS} connections are open")
                return
        with self._lock:
            self._strangers[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.admit(request)
            self.free_connections.release()

    def admit(self, request: Any) -> None:
        """Keep the connection of an allowed request."""
        with self._lock:
            self._strangers.pop(request, None)

    def _end_oldest_stranger(self) -> None:
        """End the connection that has waited longest without an allowed request, so that viewers are not kept out."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
        if oldest is not None:
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread ends

    def handle_error(self, request: Any, client_address: Any) -> None:
        level = logging.DEBUG if isinstance(sys.exception(), OSError) else logging.ERROR  # the viewer is gone
        LOG.log(level, "the connection from %s failed", client_address[0], exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "paceline", ""
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        """Answer a request."""
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        if not self._is_allowed(asked.query):
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        self.server.admit(self.connection)
        if asked.path == "/":
            self._begin("text/html; charset=utf-8")
            self.wfile.write(self.server.page.html)
        elif asked.path == "/events":
            self._send_events()
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def _is_allowed(self, query: str) -> bool:
        """Return whether the request has the token; without one, whether it names this host.

        The latter stops pages of other sites whose name was made to resolve to this host.
        """
        token = self.server.token
        if token is not None:
            given = parse_qs(query).get("token", [""])[0]
            return hmac.compare_digest(given.encode(), token.encode())
        try:
            return Address(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "").is_loopback
        except ValueError:
            return False

    def _send_events(self) -> None:
        self._begin("text/event-stream")
        with suppress(OSError), closing(self.server.feed.messages()) as messages:  # the viewer is gone, or too slow
            for message in messages:
                self.wfile.write(b"data: %b\n\n" % message)

    def _begin(self, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", self.server.page.content_security_policy)
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self.server.refusals.add(self.client_address[0], f"{status} {status.phrase}")
        self._begin("text/plain; charset=utf-8", status)
        self.wfile.write(f"{status.phrase}\n".encode())

    def send_error(self, code: int, *_: object) -> None:
        """Refuse what is no request, or one of another method, as any other."""
        self._refuse(HTTPStatus(code))

    def log_message(self, *arguments: object) -> None:
        """Keep the standard log of requests, whose URLs have the token, from standard error."""
