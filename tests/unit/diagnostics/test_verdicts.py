"""Verdicts of the checks of a machine: what is fine, what is reported, and what to do."""

import resource
from math import inf
from pathlib import Path

import pytest

from paceline.diagnostics import Status
from paceline.diagnostics.host import (
    check_folder,
    check_sharing,
    judge_clock,
    judge_cores,
    judge_disk,
    judge_files,
    judge_memory,
    judge_sharing,
)
from paceline.diagnostics.network import judge_addresses, judge_token
from paceline.diagnostics.software import judge_devices, judge_extras

OK, WARNING, PROBLEM = Status
HERE = Path("/data")


@pytest.mark.parametrize(
    ("check", "status", "advice"),
    [
        (judge_cores(4, 8, 0.5, {}), OK, ""),
        (judge_cores(1, 8, 0.5, {}), WARNING, "simulated cluster"),
        (judge_cores(4, 8, 9.0, {}), WARNING, "other processes use the cores"),
        (judge_memory(8e9, 1e9), OK, ""),
        (judge_memory(8e9, None), OK, ""),
        (judge_memory(8e9, 64e6), WARNING, "--shm-size=2g"),
        (judge_sharing("shared", ""), OK, ""),
        (judge_sharing("", "PermissionError: [Errno 13] Permission denied"), WARNING, "as one user"),
        (judge_files(1024, 4096), OK, ""),
        (judge_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), OK, ""),
        (judge_files(512, 2048), WARNING, "ulimit -n 2048"),
        (judge_files(512, resource.RLIM_INFINITY), WARNING, "ulimit -n 4096"),
        (judge_files(64, 64), PROBLEM, "the hard limit is 64"),
        (judge_disk("disk", HERE, 5e9), OK, ""),
        (judge_disk("disk", HERE, 5e8), WARNING, "--out elsewhere"),
        (judge_clock(1e-9, 10.0), OK, ""),
        (judge_clock(1e-9, -10.0), WARNING, "set-ntp true"),
        (judge_clock(0.015, 10.0), WARNING, "rounded"),
        (judge_addresses(["10.0.0.1"], has_route=True), OK, ""),
        (judge_addresses(["10.0.0.1"], has_route=False), WARNING, "ip route add"),
        (judge_addresses([], has_route=False), WARNING, "other hosts cannot take part"),
        (judge_token({}), OK, ""),
        (judge_token({"PACELINE_TOKEN": "abc"}), WARNING, "export PACELINE_TOKEN=$(paceline token)"),
        (judge_token({"PACELINE_TOKEN": "a" * 64}), WARNING, "paceline token"),
        (judge_token({"PACELINE_TOKEN": "0123456789abcdef" * 2}), OK, ""),
        (judge_extras({"digits": True, "figures": True}), OK, ""),
        (judge_extras({"digits": False, "figures": True}), WARNING, ".[digits]"),
        (judge_devices([], cuda_build=None, threads=2), OK, ""),
        (judge_devices([], cuda_build="12.4", threads=2), WARNING, "CUDA_VISIBLE_DEVICES"),
        (judge_devices(["H100", "H100"], cuda_build="12.4", threads=2), WARNING, "compare a short run with DDP first"),
    ],
    ids=lambda value: f"{value.subject}, {value.finding}" if hasattr(value, "finding") else None,
)
def test_each_verdict_has_advice_where_something_is_to_do(check, status, advice):
    assert check.status is status
    assert advice in check.advice
    assert bool(check.advice) == (status is not OK)


@pytest.mark.processes
def test_another_process_opens_memory_of_this_one():
    assert check_sharing().status is OK


def test_findings_have_numbers_with_units():
    assert judge_memory(8e9, 1e9).finding == "8.0 GB free, 1.0 GB of shared memory free"
    assert judge_cores(2, 8, 0.5, {"OMP_NUM_THREADS": "3"}).finding.startswith(
        "2 cores of 8, load 0.5, OMP_NUM_THREADS=3"
    )
    assert judge_devices(["H100"], cuda_build="12.4", threads=2).finding == "CPU with 2 threads; 1 GPU: H100"
    assert judge_addresses(["a", "b", "c", "d"], has_route=False).finding == "a, b, c, ...; no default route"


def test_a_token_is_not_printed():
    assert "sesame" not in judge_token({"PACELINE_TOKEN": "sesame"}).finding


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    missing = check_folder("disk", tmp_path / "missing")
    assert missing.status is PROBLEM
    assert str(tmp_path / "missing") in missing.finding
    assert check_folder("disk", tmp_path).status in {OK, WARNING}
    assert list(tmp_path.iterdir()) == []
    assert judge_disk("disk", tmp_path, inf).status is OK
