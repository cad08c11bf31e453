"""What the program prints without a command, and what it chooses without options."""

import json
import sys
from importlib.metadata import version

import pytest

from paceline.cli import main
from paceline.cli.default_options import default_options
from paceline.cli.program import app


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_without_a_command_the_first_screen_names_commands_that_exist(monkeypatch, capsys):
    assert not run(monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    named = {line.split()[1] for line in lines if line.startswith("  paceline ")}
    assert named == {"train", "compare", "run", "protocols", "doctor"}
    assert named <= {command.name or command.callback.__name__ for command in app.registered_commands}


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert not run(monkeypatch, "--version")
    assert capsys.readouterr().out == f"paceline {version('paceline')}\n"


def test_ctrl_c_while_the_program_is_imported_ends_it_without_a_traceback(monkeypatch):
    class Interrupted:
        @staticmethod
        def find_spec(name, *_):
            if name == "paceline.cli.program":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "paceline.cli.program")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert run(monkeypatch, "--version") == 130


def options(**given):
    return {"job": "digits", "protocol": None, "cluster": None, "stop": None, **given}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, {"protocol": "k_sync(k=1)", "cluster": "local:2", "stop": "loss=0.5,epochs=10"}),
        ({"cluster": "8*exp(mean=1)"}, {"protocol": "k_sync(k=7)", "stop": "loss=0.5,epochs=10"}),
        ({"cluster": "local:1", "stop": "updates=1"}, {"protocol": "k_sync(k=1)"}),
        ({"job": "mnist"}, {"protocol": "k_sync(k=1)", "cluster": "local:2"}),
        ({"protocol": "bsp", "cluster": "local:2", "stop": "updates=1"}, {}),
    ],
)
def test_only_options_that_were_not_given_are_chosen(given, chosen):
    assert default_options(options(**given), under_torchrun=False) == chosen


def test_under_torchrun_the_workers_are_its_ranks(monkeypatch):
    launch = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PACELINE_TOKEN": "x"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    chosen = default_options(options(), under_torchrun=True)
    assert chosen == {"protocol": "k_sync(k=2)", "cluster": "torchrun", "stop": "loss=0.5,epochs=10"}


def test_what_was_chosen_is_printed_and_recorded(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert not run(monkeypatch, "train", "digits", "--cluster", "4*exp(mean=1)", "--stop", "updates=1")
    assert capsys.readouterr().err.splitlines()[0] == "chosen by default: --protocol 'k_sync(k=3)'"
    assert not run(monkeypatch, "train", "--resume", "runs/digits-softmax-1", "--stop", "updates=2")
    assert "chosen by default" not in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "sidecar", "printed"), [("0", "", True), ("1", "", False), ("0", "2", False)])
def test_of_all_ranks_only_rank_0_prints_what_was_chosen(monkeypatch, capsys, tmp_path, rank, sidecar, printed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("PACELINE_SIDECAR", sidecar)
    assert not run(monkeypatch, "train", "digits", "--cluster", "4*exp(mean=1)", "--stop", "updates=1")
    assert ("chosen by default" in capsys.readouterr().err) == printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train"], "JOB missing; for example: paceline train digits"),
        (["train", "mnist"], "--stop missing; for example: paceline train JOB --stop loss=0.2,epochs=10"),
    ],
)
def test_what_cannot_be_chosen_is_asked_for_alone(monkeypatch, capsys, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words) == 2
    assert capsys.readouterr().err == f"paceline: {said}\n"


def test_the_shell_completes_commands(monkeypatch, capsys):
    variables = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline pro", "COMP_CWORD": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run(monkeypatch)
    assert capsys.readouterr().out.split() == ["protocols"]


def test_the_result_of_a_replay_is_also_json(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert not run(monkeypatch, "train", "digits", "--cluster", "2*exp(mean=1)", "--stop", "updates=2", "--out", "run")
    capsys.readouterr()
    assert not run(monkeypatch, "replay", "run", "--format", "json")
    assert json.loads(capsys.readouterr().out)["difference"] == ""
