import re
import socket
from contextlib import suppress
from threading import Event

import pytest

from paceline.core.records import DecisionMade
from paceline.errors import UsageError
from paceline.watch.address import PORT, Address
from paceline.watch.run_page import serve_page
from written_runs import begun, two_updates, write_run


def test_the_page_is_served_until_a_condition_holds(tmp_path):
    write_run(tmp_path / "run", two_updates())
    over = Event()
    over.set()
    urls = []
    serve_page(tmp_path / "run", Address(port=0), urls.append, over.is_set)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", *urls)


def test_another_port_is_taken_if_the_default_one_is_in_use(tmp_path):
    urls = []
    write_run(tmp_path / "run", two_updates())
    over = Event()
    over.set()
    with socket.socket() as busy:
        with suppress(OSError):  # it is in use already
            busy.bind(("127.0.0.1", PORT))
            busy.listen()
        serve_page(tmp_path / "run", None, urls.append, over.is_set)
    assert not urls[0].endswith(f":{PORT}")


def test_a_log_that_no_run_writes_ends_the_page_with_an_error(tmp_path):
    write_run(tmp_path / "run", [begun(), DecisionMade(now_s=0.0, kind="learning_rate", reason="", numbers={})])
    with pytest.raises(UsageError, match=r"run holds what no run writes \(KeyError: 'scale'\)"):
        serve_page(tmp_path / "run", Address(port=0), [].append)
