"""The page of a run: served by this process, or by a child of the process that trains.

Run as a program, this module is the child. Viewers take no time of the run then, and the page shows how the run ends,
also when it is killed.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from paceline.errors import PacelineError, UsageError
from paceline.recording.validation import believed
from paceline.utils.wording import first_line
from paceline.watch.address import Address
from paceline.watch.feed import Feed
from paceline.watch.follow import follow
from paceline.watch.server import PageServer
from paceline.watch.watcher import Watcher

NICENESS = 10  # of the child: where all cores are busy, the run comes first


def serve_page(
    folder: Path,
    address: Address | None,
    announce: Callable[[str], object],
    has_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Serve the page of a run.

    Args:
        folder: folder of the run, which need not exist yet.
        address: address of the page; None for the default one, or a free port if that is in use.
        announce: function that is called with the URL of the page.
        has_ended: condition that ends it, tested at each poll.

    Raises:
        UsageError: the address cannot be used, or the log holds what no run writes.
        RunError: the log of the run cannot be read.
    """
    feed = Feed()
    server = _server(address, feed)
    server.start()
    announce(server.url)
    try:
        with believed(folder):
            follow(Watcher(folder), feed, has_ended)
    finally:
        feed.close()
        server.close()


def _server(address: Address | None, feed: Feed) -> PageServer:
    if address is not None:
        return PageServer(address, feed)
    with suppress(UsageError):
        return PageServer(Address(), feed)
    return PageServer(Address(port=0), feed)


@contextmanager
def served_beside(folder: Path, address: Address | None) -> Iterator[str]:
    """Serve the page of a run in a child process, which ends with the run, and yield its URL.

    Args:
        folder: folder of the run, which need not exist yet.
        address: address of the page; None for the default one, or a free port if that is in use.

    Raises:
        UsageError: the address cannot be used.
    """
    arguments = [str(os.getpid()), str(folder), *([str(address)] if address else [])]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *arguments],  # -P: no module of the working folder hides one of Python
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C goes to the run only
    )
    assert child.stdout is not None
    with child, child.stdout:
        answer = child.stdout.readline().strip()  # URL, or why there is none
        if not answer.startswith("http://"):
            raise UsageError(answer or f"the page of the run cannot be served at {address or Address()}")
        try:
            yield answer
        finally:
            child.terminate()


def _tell_parent(answer: str) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def _main(parent: str, folder: str, address: str | None = None) -> None:
    logging.basicConfig(format="paceline: %(message)s")
    os.nice(NICENESS)
    is_over, is_served = Event(), Event()

    def announce(url: str) -> None:
        is_served.set()
        _tell_parent(url)

    signal.signal(signal.SIGTERM, lambda number, frame: is_over.set())
    try:
        has_ended = lambda: is_over.is_set() or os.getppid() != int(parent)  # noqa: E731
        serve_page(Path(folder), Address.parse(address) if address else None, announce, has_ended)
    except PacelineError as error:
        reason = first_line(str(error))
        if is_served.is_set():
            sys.exit(f"paceline: {reason}")
        _tell_parent(reason)  # which raises it as an error of its command
        sys.exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
