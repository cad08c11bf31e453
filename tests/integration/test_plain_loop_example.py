"""Example of a plain loop: how many lines differ between the single-process script and the attached one."""

import difflib

from paths import ROOT

FOLDER = ROOT / "examples/plain_loop"
ALLOWED = 3  # changed or added lines, beside the import


def code_of(name):
    """Return the lines after the docstring, without imports of paceline and empty lines."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()[1:]
    return [line for line in lines if line and line != "import paceline as pl"]


def test_attaching_a_loop_changes_three_lines():
    changes = list(difflib.ndiff(code_of("single.py"), code_of("attached.py")))
    assert 1 <= len([line for line in changes if line.startswith("+ ")]) <= ALLOWED
