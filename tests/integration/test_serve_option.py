"""`paceline train --serve` with an address that cannot be used: one error, in the words of the command line."""

import io
import os
import signal
import socket
import sys
from contextlib import redirect_stdout

import pytest

from paceline.cli import main
from paceline.watch import run_page


class ChildHere(io.StringIO):
    """Child process whose program has run to its end in this process."""

    def __init__(self, command, **options):
        super().__init__()
        self.stdout = self
        before = signal.getsignal(signal.SIGTERM)
        try:
            with redirect_stdout(self):
                run_page._main(*command[command.index("-m") + 2 :])
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)
        self.seek(0)


def test_a_port_in_use_is_one_error_with_the_option_to_give(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    monkeypatch.setattr(run_page.subprocess, "Popen", ChildHere)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["train", "digits", "--protocol", "bsp", "--cluster", "2*exp(mean=1)", "--stop", "updates=2"]
        monkeypatch.setattr(sys, "argv", ["paceline", *words, "--serve", "--address", address])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.startswith(f"paceline: cannot listen at {address}: Address already in use; give another address")
    assert printed.endswith("for example --address :0")
    assert printed.count("paceline:") == 1
    assert not (tmp_path / "runs").exists()
