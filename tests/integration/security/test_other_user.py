"""A process of another user on the host of a run without `PACELINE_TOKEN`."""

import os
import subprocess
import sys

import pytest

from attackers import security, serving, transport
from paceline.clusters.launch_env import LaunchEnv
from paceline.engines.distributed.rendezvous.token_file import create_token, token_path
from paceline.engines.distributed.transport.connection import ConnectionLost
from selections import parametrize_few

ATTACK = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
path = sys.argv[1]
folder = os.path.dirname(path)
for what in (
    lambda: open(path).read(),
    lambda: open(path, "w"),
    lambda: os.listdir(folder),
    lambda: os.unlink(path),
    lambda: os.symlink("/tmp", path + "2"),
    lambda: os.rename(folder, folder + "2"),
    lambda: os.chmod(path, 0o666),
):
    try:
        what()
    except PermissionError:
        print("refused")
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_another_user_of_the_host_neither_reads_nor_replaces_the_token(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    ranks = LaunchEnv.from_environment(variables)
    token, path = create_token(ranks), token_path(ranks)
    command = [sys.executable, "-I", "-S", "-c", ATTACK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 7
    assert path.read_text() == token
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]


@parametrize_few("guess", ["", "127.0.0.1:29500", "none", "29500", "paceline", "0"], keep=1)
def test_a_guess_from_what_is_public_is_refused(guess):
    with serving(security(encrypt=True)) as server:
        with transport(security(encrypt=True, token=guess)) as client, pytest.raises(ConnectionLost):
            client.connect(server.address)
        assert not server.connections
