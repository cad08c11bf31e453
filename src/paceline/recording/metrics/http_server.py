"""HTTP server of a few read-only pages, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, ClassVar, NamedTuple

from paceline.utils.rank_logger import RankLogger

LOG = RankLogger(__name__)
REQUEST_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 32
POLL_S = 0.1  # after which the thread sees that the server is closed
TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """Answer to a request."""

    content: bytes
    content_type: str = TEXT
    status: HTTPStatus = HTTPStatus.OK


class MetricsServer:
    """HTTP server in a daemon thread, which answers each request in another one.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        pages: functions that return the page at each path, given the header ``Accept``.

    Attributes:
        url: address of the server.

    Raises:
        OSError: the address is not this host's, or its port is in use.
    """

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[str], Page]]) -> None:
        handler = type("Handler", (_Handler,), {"pages": pages})
        kind = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        self._server = kind((host, port), handler)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_address[1]}"
        serve = partial(self._server.serve_forever, POLL_S)
        self._thread = threading.Thread(target=serve, name="paceline-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # a slow reader must not hold up the end of the run
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; close it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            LOG.debug("too many connections; that of %s is closed", client_address)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer in the thread of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that has ended before its answer."""
        LOG.debug("the connection of %s has ended", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    pages: ClassVar[Mapping[str, Callable[[str], Page]]]
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer a request."""
        answer = self._answer(self.path.partition("?")[0])
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def _answer(self, path: str) -> Page:
        if path not in self.pages:
            there = " and ".join(self.pages)
            return Page(f"no such page; there is {there}\n".encode(), status=HTTPStatus.NOT_FOUND)
        try:
            return self.pages[path](self.headers.get("Accept", ""))
        except Exception:
            LOG.exception("%s cannot be served; the run continues", path)
            return Page(b"internal error; see the log of the run\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request at the level of debugging."""
        LOG.debug(format, *args)
