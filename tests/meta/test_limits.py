"""Limits on tests, which `tests/conftest.py` enforces, and their waits."""

import re
import subprocess
import sys

import pytest
import torch

from machine_speed import SLOWNESS, scaled
from paths import ROOT

# A constant, or a wait of five seconds or more, without `scaled`; `join(5)` may be the fifth process.
UNSCALED = re.compile(
    r"^(?:LIMIT|WAIT|SOON|ANSWER|START_TIMEOUT)_S = \d"
    r"|\.(?:join|wait|get|communicate|poll)\((?:timeout=)?(?:[5-9]\.0|(?<==)[5-9]|\d{2,}(?:\.0)?)\)",
    re.MULTILINE,
)


@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="it is not marked processes")
def test_a_test_that_starts_a_process_without_its_marker_fails():
    subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="it leaves another number of threads")
def test_a_test_that_leaves_torch_with_other_threads_fails():
    torch.set_num_threads(2)


def test_waits_scale_with_the_speed_of_the_machine():
    assert scaled(20) == 20 * SLOWNESS >= 20
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_limits.py"]
    found = {path.name: UNSCALED.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: waits for name, waits in found.items() if waits} == {}
    assert UNSCALED.findall("LIMIT_S = 20\nthread.join(10.0)\nqueue.get(timeout=5)\nevent.wait(0.1)\n") == [
        "LIMIT_S = 2",
        ".join(10.0)",
        ".get(timeout=5)",
    ]
