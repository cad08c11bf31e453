"""Tables of the names that a string for a job, a protocol or a cluster may have, written when the site is built."""

from inspect import getdoc, signature

from command_line_page import plain

from paceline.catalogue.modifiers import ADDITIONS
from paceline.catalogue.parser import PLANS
from paceline.catalogue.protocols import CATALOGUE
from paceline.clusters.timing.distributions import DISTRIBUTIONS
from paceline.jobs.registry import JOBS

PAGE = "reference/configuration"
TABLES = {
    "<!-- jobs -->": JOBS,
    "<!-- protocols -->": {**CATALOGUE, **PLANS},
    "<!-- modifiers -->": ADDITIONS,
    "<!-- distributions -->": DISTRIBUTIONS,
}


def table(factories):
    """Return a table of names with their arguments and meanings as Markdown."""
    rows = [f"| `{call(name, make)}` | {_meaning(make)} |" for name, make in factories.items()]
    return "\n".join(["| String | Meaning |", "| --- | --- |", *rows])


def call(name, make):
    """Return a call with the arguments of a factory, as typed; a job has its own arguments only.

    >>> call("k_sync", CATALOGUE["k_sync"])
    'k_sync(k)'
    """
    arguments = [each for each in signature(make).parameters.values() if each.kind is not each.KEYWORD_ONLY]
    texts = [each.name if each.default is each.empty else f"{each.name}={each.default}" for each in arguments]
    return f"{name}({', '.join(texts)})" if texts else name


def _meaning(make):
    return plain(getdoc(make).partition("\n\n")[0].partition(": ``")[0].replace("`", "")).rstrip(".") + "."


def insert_tables(app, page, source):
    """Insert the tables into the page."""
    if page == PAGE:
        for place, factories in TABLES.items():
            source[0] = source[0].replace(place, table(factories))


def setup(app):
    """Register the tables."""
    app.connect("source-read", insert_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
