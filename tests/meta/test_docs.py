"""The documentation lists what there is, and every place that it names exists."""

import re

from paceline.catalogue.protocols import CATALOGUE
from paths import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "examples"
PAGES_WITH_PATHS = (
    "docs/concepts/architecture.md",
    "docs/concepts/guarantees/*.md",
    "CONTRIBUTING.md",
    "docs/decisions/*.md",
)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_readme_lists_every_protocol():
    assert re.findall(r"^\| `(\w+)", README, re.MULTILINE) == list(CATALOGUE)


def test_the_program_of_ten_lines_has_ten_lines_or_fewer():
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 10


def test_the_own_model_example_has_at_most_25_lines():
    assert len((EXAMPLES / "own_model.py").read_text().splitlines()) <= 25


def pages(*patterns):
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def test_every_link_has_a_target():
    assert [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages("*.md", "docs/**/*.md", "benchmarks/*.md", "papers/*/README.md")
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ] == []


def test_every_path_that_a_page_names_exists():
    assert [
        f"{page.relative_to(ROOT)}: {place}"
        for page in pages(*PAGES_WITH_PATHS)
        for place in re.findall(r"`([\w/.]+(?:\.py|/))`", page.read_text(encoding="utf-8"))
        if not (ROOT / "src/paceline" / place).exists() and not (ROOT / place).exists()
    ] == []


def test_decisions_are_numbered_short_and_in_the_index():
    records = pages("docs/decisions/0*.md")
    texts = [record.read_text(encoding="utf-8") for record in records]
    assert [record.name[:4] for record in records] == [f"{number:04}" for number in range(1, len(records) + 1)]
    assert {tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) for text in texts} == {
        ("Context", "Decision", "Consequences")
    }
    assert max(len(text.splitlines()) for text in texts) < 40
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    assert re.findall(r"\((0.*)\)", index) == [record.name for record in records]
