"""`paceline doctor` on machines that have a problem: each is named, with what to do."""

import json
import subprocess
import sys

import pytest

from benchmarks.namespaces import hosts, why_there_are_none
from hosts import need_hosts
from machine_speed import scaled
from paths import environment

DOCTOR = [sys.executable, "-m", "paceline", "doctor", "--format", "json"]


pytestmark = pytest.mark.slow


def found(command, cwd, **variables):
    """Return the checks by subject, and the last line on standard error."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(**variables), capture_output=True, text=True, check=False, timeout=scaled(100)
    )
    checks = {check["subject"]: check for check in json.loads(done.stdout)}
    problems = [subject for subject, check in checks.items() if check["status"] == "problem"]
    assert done.returncode == bool(problems)
    assert all(subject in done.stderr for subject in problems)
    return checks, problems


def test_a_machine_without_problems_trains(tmp_path):
    checks, problems = found(DOCTOR, tmp_path)
    assert problems == []
    assert checks["workers"]["finding"].startswith("two worker processes trained")
    assert checks["gloo"]["status"] == "ok"


def test_few_open_files_are_a_problem(tmp_path):
    checks, problems = found(["bash", "-c", 'ulimit -n 64; exec "$@"', "-", *DOCTOR, "--quick"], tmp_path)
    assert problems == ["open files"]
    assert "hard limit is 64" in checks["open files"]["advice"]


def test_a_host_without_a_route_is_reported_and_one_without_loopback_is_a_problem(tmp_path):
    need_hosts()
    with hosts(1) as made:
        inside = ["ip", "netns", "exec", made.names[0]]
        checks, problems = found([*inside, *DOCTOR, "--quick"], tmp_path)
        assert problems == []
        assert checks["addresses"]["finding"] == f"{made.address(0)}; no default route"
        subprocess.run([*inside, "ip", "link", "set", "lo", "down"], check=True)
        checks, problems = found([*inside, *DOCTOR], tmp_path)
        assert "loopback" in problems
        assert "ip link set lo up" in checks["loopback"]["advice"]


def test_a_full_disk_is_a_problem(tmp_path):
    if why_there_are_none():
        pytest.skip("mounting needs root")
    fill = 'mount -t tmpfs -o size=64k tmpfs . && cd "$PWD" && head -c 64K /dev/zero > full; exec "$@"'
    on_full_disk = ["unshare", "--mount", "bash", "-c", fill, "-"]
    checks, problems = found([*on_full_disk, *DOCTOR, "--quick"], tmp_path, TMPDIR="/tmp")
    assert problems == ["disk"]
    assert "No space left on device" in checks["disk"]["finding"]
