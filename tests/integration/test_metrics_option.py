"""`paceline train --metrics`: where the metrics are served, and what is refused."""

import json
import socket
import sys

import pytest

from paceline.cli import main

pytest.importorskip("prometheus_client")


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Return a function that trains with an option, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "digits",
        "--protocol",
        "bsp",
        "--cluster",
        "2*exp(mean=1)",
        "--stop",
        "updates=2",
        "--out",
        "run",
    ]
    return lambda metrics: run(monkeypatch, *words, "--metrics", metrics)


@pytest.mark.parametrize("host", ["", "127.0.0.1:"])
def test_a_port_in_use_is_an_error_at_the_start(train, host, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert train(f"{host}{port}") == 2
    assert f"metrics cannot be served at 127.0.0.1:{port}" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_the_option_is_saved_for_a_resumed_run(train, tmp_path):
    assert not train("localhost:0")
    assert json.loads((tmp_path / "run/command.json").read_text())["metrics"] == "localhost:0"


INVALID = {
    "nine": "--metrics nine, expected PORT or HOST:PORT, for example --metrics 9464",
    "70000": "70000 is not a number in [0, 65535]",
}


@pytest.mark.parametrize("given", INVALID)
def test_an_invalid_port_is_refused(train, given, capsys):
    assert train(given) == 2
    assert INVALID[given] in " ".join(capsys.readouterr().err.split())
