"""Limits on tests, which `tests/conftest.py` enforces."""

import subprocess
import sys

import pytest


@pytest.mark.xfail(strict=True, raises=pytest.fail.Exception, reason="it is not marked processes")
def test_a_test_that_starts_a_process_without_its_marker_fails():
    subprocess.run([sys.executable, "-c", ""], check=True)
