"""The programs of examples/, the README, CONTRIBUTING and docs/, and one with own parts, pass `mypy --strict`."""

import re
import runpy
import subprocess
import sys

import pytest

from paths import ROOT, SUPPORT

OWN_PARTS = SUPPORT / "jobs/own_parts.py"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs():
    """Yield the blocks of each page as one program, since a block may use the names of those above it."""
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        if blocks:
            yield "_".join(page.relative_to(ROOT).with_suffix(".py").parts).replace("-", "_"), "\n".join(blocks)


@pytest.mark.docs
@pytest.mark.timeout(300)
def test_every_documented_program_passes_mypy_strict(tmp_path):
    for name, code in programs():
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


@pytest.mark.docs
def test_user_defined_parts_need_only_public_names(capsys):
    runpy.run_path(str(OWN_PARTS))
    assert capsys.readouterr().out.split() == ["2.0", "updates"]
