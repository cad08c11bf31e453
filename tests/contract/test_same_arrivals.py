"""The benchmark that holds the three engines to each other, on a few updates; and that it would see a difference."""

import json
import subprocess
import sys

import pytest

from machine_speed import scaled
from paths import ROOT, environment


@pytest.mark.slow
def test_three_engines_with_the_same_arrivals_produce_the_same_run():
    script = [
        sys.executable,
        "benchmarks/same_arrivals.py",
        "--updates",
        "12",
        "--protocols",
        "bsp",
        "k_sync(k=3)",
        "asp",
    ]
    done = subprocess.run(
        script, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=scaled(110)
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert list(results) == ["local", "distributed", "distributed, wire=bf16"]
    for result in results.values():
        assert result["meets_bar"]
        assert all(row["same"] and row["decisions"] > 12 for row in result["protocols"].values())
    assert results["distributed, wire=bf16"]["largest_relative_difference"]["unrounded"] > 1e-4
