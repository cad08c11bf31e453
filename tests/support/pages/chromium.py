"""Chromium for tests of pages; without it they are skipped, except where all tests must run."""

import os
import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium")
NO_CHROMIUM = "there is no chromium to open the page with"
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason=NO_CHROMIUM)


@contextmanager
def chromium():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, NO_CHROMIUM
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
