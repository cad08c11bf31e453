"""Examples of attached loops: how many lines differ between the single-process script and the attached one."""

import difflib

import pytest

from paths import ROOT

ALLOWED = 3  # changed or added lines, beside imports


def code_of(path):
    """Return the lines after the docstring, without imports and empty lines."""
    lines = (ROOT / "examples" / path).read_text(encoding="utf-8").splitlines()[1:]
    return [line for line in lines if line and not line.startswith(("import ", "from "))]


@pytest.mark.parametrize(
    "pair", ["plain_loop/{}", "frameworks/accelerate_{}", "frameworks/lightning_{}", "frameworks/transformers_{}"]
)
def test_attaching_changes_three_lines(pair):
    single, attached = (code_of(pair.format(kind) + ".py") for kind in ("single", "attached"))
    changes = list(difflib.ndiff(single, attached))
    assert 1 <= len([line for line in changes if line.startswith("+ ")]) <= ALLOWED
