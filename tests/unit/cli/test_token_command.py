"""`paceline token` in a shell."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.clusters.job_token import MIN_BITS, estimate_bits
from paths import environment


@pytest.mark.slow
def test_the_token_can_be_exported():
    script = 'export PACELINE_TOKEN=$(paceline token) && printf "%s" "$PACELINE_TOKEN"'
    variables = environment(PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    done = [
        subprocess.run(["sh", "-c", script], env=variables, capture_output=True, text=True, check=True) for _ in "ab"
    ]
    assert [each.stderr for each in done] == ["", ""]
    for each in done:
        assert each.stdout.split() == [each.stdout]
        assert estimate_bits(each.stdout) >= MIN_BITS
    assert done[0].stdout != done[1].stdout
