"""The code of the README and of the site's pages, collected as tests with the marker `docs`."""

from importlib.util import find_spec

import pytest
from sybil import Sybil

from shown_code import new_folder, remove_folder, shown_blocks

pages = Sybil(
    parsers=[shown_blocks],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=new_folder,
    teardown=remove_folder,
    path=".",
)
pytest_collect_file = pages.pytest()

# Doctests import each module, but what these modules need is not installed for the default tests.
MODULES = {
    "integrations/accelerate": "accelerate",
    "integrations/lightning": "lightning",
    "integrations/ray": "ray",
    "integrations/transformers": "transformers",
    "run/ray_actors": "ray",
}
collect_ignore = [f"src/paceline/{name}.py" for name, package in MODULES.items() if not find_spec(package)]


def pytest_collection_modifyitems(items):
    for item in items:
        block = getattr(getattr(item, "example", None), "parsed", None)
        if block is not None:
            item.add_marker(pytest.mark.docs)
            if "slow" in (block["mark"] or ""):
                item.add_marker(pytest.mark.slow)
