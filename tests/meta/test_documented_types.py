"""The programs of examples/, the README, CONTRIBUTING and docs/, and one with own parts, pass `mypy --strict`."""

import re
import runpy
import subprocess
import sys

import pytest

from paths import ROOT, SUPPORT

OWN_PARTS = SUPPORT / "own_parts.py"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks():
    for page in PAGES:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)):
            yield f"{page.stem}_{number}.py", code


@pytest.mark.docs
@pytest.mark.timeout(300)
def test_every_program_that_the_documentation_shows_passes_mypy_strict(tmp_path):
    for name, code in blocks():
        (tmp_path / name).write_text(code, encoding="utf-8")
    checked = [OWN_PARTS, *sorted(tmp_path.glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *checked],
        cwd=ROOT,  # with the project's own settings, and its cache
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_law_a_controller_and_a_compensator_of_ones_own_need_nothing_but_the_public_names(capsys):
    runpy.run_path(str(OWN_PARTS))
    assert capsys.readouterr().out.split() == ["2.0", "updates"]
