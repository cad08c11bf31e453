"""Spreads over seeds in the tables of papers/, and the tables themselves."""

import importlib
import re
from pathlib import Path

import pytest

from papers.series import spread
from selections import parametrize_few

PAPERS = ("dbw", "dc_s3gd", "slow_and_stale", pytest.param("sync_switch", marks=pytest.mark.slow))


def test_a_spread_shows_mean_interval_and_range():
    assert spread([54.0, 56.0, 61.0], 1) == "57.0 +- 9.0 (54.0 to 61.0)"
    assert spread([38.4], 1) == "38.4 (one seed)"
    assert spread([], 1) == "-"


@parametrize_few("paper", PAPERS, keep=1)
def test_the_tables_are_those_of_the_kept_results(paper):
    table = importlib.import_module(f"papers.{paper}.table")
    kept = (Path(table.RESULTS) / "tables.md").read_text()
    assert "\n".join(table.tables(table.RESULTS)) + "\n" == kept


@pytest.mark.parametrize("paper", PAPERS)
def test_the_page_defines_its_ranges(paper):
    words = re.sub(r"\s+", " ", (Path("papers") / paper / "README.md").read_text())
    assert "smallest and" in words
    assert "no interval: one more seed lies outside with probability 2 / (seeds + 1)" in words
