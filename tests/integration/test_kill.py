"""kill -9 at any point, and the resumed run is the one that was never killed."""

import signal
import subprocess
import sys
from random import Random

import pytest

import killed_run
from paceline.recording.run_folder import EVENTS, MODEL
from paths import environment

_random = Random(20)
POINTS = [round(_random.uniform(0.0, 1.0), 4) for _ in range(20)]


def run(folder, at_call):
    command = [sys.executable, killed_run.__file__, str(folder), str(at_call)]
    return subprocess.run(command, env=environment(), check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the folder of the run that is not killed, and how many function calls it makes."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    return folder, int(run(folder, at_call=-1).stdout)


def check(unbroken, point, folder):
    whole, calls = unbroken
    assert run(folder, int(point * calls)).returncode == -signal.SIGKILL
    killed_run.train(resume=folder)
    for name in (EVENTS, MODEL):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("point", [0.6])
@pytest.mark.filterwarnings("ignore:.*ended in the middle of a line")
def test_killed(unbroken, point, tmp_path):
    check(unbroken, point, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.filterwarnings("ignore:.*ended in the middle of a line")
def test_killed_at_twenty_random_times(unbroken, point, tmp_path):
    check(unbroken, point, tmp_path / "run")
