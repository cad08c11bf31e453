"""The site of the documentation: every public name has one entry, and a reference leads to it."""

import re
import sys
from dataclasses import fields
from importlib import import_module
from inspect import getdoc, isclass, isfunction, signature
from typing import get_args

import pytest
from typer.main import get_command

from paceline.cli.program import app
from paceline.clusters.parser import load_cluster
from paceline.core.records import Record
from paths import ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

from command_line_page import command_line  # noqa: E402 - the folder is no package
from module_tables import floors, module_tables, modules  # noqa: E402
from public_names import NAMESPACES, documented_name, public_names  # noqa: E402
from record_fields import field_meanings, record_tables  # noqa: E402
from shown_files import shown_file, text_on_site  # noqa: E402
from string_tables import TABLES, table  # noqa: E402

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


def test_every_module_is_in_the_table_of_its_floor():
    page = (DOCS / "concepts/architecture.md").read_text(encoding="utf-8")
    assert module_tables(page).count(".py` |") == len(modules())
    assert floors(page)[0] == "errors"


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
        ("paceline.run.result.Result", "paceline.results.Result"),
        ("Exponential", "paceline.timing.Exponential"),
        ("Job.step", "paceline.Job"),
        ("Stop.parse", "paceline.Stop.parse"),
        ("Totals", "paceline.recording.history.Totals"),
        ("no_such_name", None),
    ],
)
def test_a_reference_leads_to_the_entry_of_its_object(reference, place):
    documented = [
        "paceline.train",
        "paceline.results.Result",
        "paceline.timing.Exponential",
        "paceline.Job",
        "paceline.Stop",
    ]
    documented += ["paceline.Stop.parse", "paceline.recording.history.Totals", "paceline.theory"]
    assert documented_name(reference, public_names(), documented) == place


def test_the_page_of_the_command_line_has_every_command_option_and_default():
    page = command_line()
    program = get_command(app)
    assert {f"## `paceline {name}`" for name in program.commands if name != "data"} < set(page.splitlines())
    assert "## `paceline data fetch`" in page.splitlines()
    options = [name for each in program.commands.values() for option in each.params for name in option.opts]
    assert [name for name in options if name.startswith("--") and not re.search(f"^`(-., )?{name}", page, re.M)] == []
    assert "`--format <text|json>`\n: Format of the results. \\[default: text\\]" in page


def test_the_page_of_file_formats_explains_every_field_of_the_log():
    for record in get_args(Record):
        assert {field.name for field in fields(record)} - {"now_s"} <= field_meanings(record).keys()
    assert record_tables().count("### ") == len(get_args(Record))


def test_the_page_of_configuration_has_a_table_for_every_kind_of_string_and_files_that_load(tmp_path):
    page = (DOCS / "reference/configuration.md").read_text(encoding="utf-8")
    for place, factories in TABLES.items():
        assert place in page
        assert all(f"| `{name}" in table(factories) for name in factories)
    for text in re.findall(r"```toml\n(.*?)```", page, re.DOTALL):
        (tmp_path / "cluster.toml").write_text(text)
        load_cluster(tmp_path / "cluster.toml")


def test_a_file_of_the_repository_is_shown_with_links_to_the_pages_of_the_site(tmp_path):
    docs, readme = tmp_path / "docs", tmp_path / "bench/README.md"
    (docs / "papers").mkdir(parents=True)
    readme.parent.mkdir()
    readme.write_text("[a](../CONTRIBUTING.md) [b/c](results.md) ![d](e.svg) [f](../docs/g.md#h) [i](https://j.org)")
    (docs / "bench.md").write_text("<!-- shows ../bench/README.md -->\n")
    (docs / "papers/about.md").write_text("<!-- shows ../../CONTRIBUTING.md -->\n")
    (docs / "g.md").write_text("# G\n")
    assert shown_file(docs / "bench.md") == readme
    assert shown_file(docs / "g.md") is None
    assert text_on_site(readme, docs / "bench.md", docs) == (
        "[a](papers/about.md) `b/c` ![d](../bench/e.svg) [f](g.md#h) [i](https://j.org)"
    )


def test_every_paper_and_the_benchmarks_have_a_page():
    shown = {shown_file(page) for page in DOCS.rglob("*.md")}
    assert {*ROOT.glob("papers/*/README.md"), ROOT / "benchmarks/README.md", ROOT / "CHANGELOG.md"} <= shown


RECORDS = {"GradientArrived", "StepMeasured", "UpdateMade"}  # the page of file formats describes their other fields
WITHOUT_ARGUMENTS = {"Outcome", *RECORDS}


def test_the_docstring_of_every_public_name_describes_each_argument():
    missing = []
    for namespace in NAMESPACES:
        for name in set(import_module(namespace).__all__) - WITHOUT_ARGUMENTS:
            public = getattr(import_module(namespace), name)
            if isfunction(public) or (isclass(public) and not issubclass(public, Exception)):
                text = getdoc(public) or ""
                arguments = signature(public).parameters.keys() - {"self", "args", "kwargs"}
                missing += [
                    f"{name}: {each}" for each in arguments if not re.search(rf"^ +{each}: ", text, re.MULTILINE)
                ]
    assert missing == []


def test_an_imported_name_is_found_where_it_is_defined():
    place = "paceline.core.decision.DecisionMade"
    assert documented_name("paceline.core.records.DecisionMade", public_names(), {place}) == place
    assert documented_name("paceline.core.records.Nothing", public_names(), {place}) is None
