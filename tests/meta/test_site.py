"""The site of the documentation: every public name has one entry, and a reference leads to it."""

import re
import sys
from importlib import import_module

import pytest

from paths import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

from public_names import NAMESPACES, documented_name, public_names  # noqa: E402 - it is no package

ENTRY = re.compile(r"^\.\. (?:py:)?(currentmodule|module|auto\w+|data):: (\S+)$", re.MULTILINE)


def entries(page):
    """Return the full names of the objects that an API page describes."""
    names, module = [], ""
    for directive, name in ENTRY.findall(page.read_text(encoding="utf-8")):
        if directive in {"currentmodule", "module"}:
            module = name
        else:
            names.append(name if name.startswith("paceline.") else f"{module}.{name}")
    return names


def test_every_public_name_is_on_exactly_one_page():
    public = [
        f"{namespace}.{name}"
        for namespace in NAMESPACES
        for name in import_module(namespace).__all__
        if f"{namespace}.{name}" not in NAMESPACES
    ]
    described = [name for page in sorted((DOCS / "reference/api").glob("*.md")) for name in entries(page)]
    assert sorted(name for name in described if name in public) == sorted(public)
    assert len(described) == len(set(described))


@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ("pl.train", "paceline.train"),
        ("paceline.run.train.Result", "paceline.Result"),
        ("Exponential", "paceline.Exponential"),
        ("Job.step", "paceline.Job"),
        ("Stop.parse", "paceline.Stop.parse"),
        ("Totals", "paceline.recording.history.Totals"),
        ("no_such_name", None),
    ],
)
def test_a_reference_leads_to_the_entry_of_its_object(reference, place):
    documented = ["paceline.train", "paceline.Result", "paceline.Exponential", "paceline.Job", "paceline.Stop"]
    documented += ["paceline.Stop.parse", "paceline.recording.history.Totals", "paceline.theory"]
    assert documented_name(reference, public_names(), documented) == place
