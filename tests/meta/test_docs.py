"""The documentation lists what there is, and every place that it names exists."""

import re

import pytest

from paceline.catalogue.protocols import CATALOGUE
from paths import ROOT
from prose import reading_seconds, sentences, words
from shown_code import BLOCK, checked_pages

README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "examples"
PAGES_WITH_PATHS = (
    "docs/concepts/architecture.md",
    "docs/concepts/guarantees/*.md",
    "CONTRIBUTING.md",
    "docs/decisions/*.md",
)


def test_the_readme_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 150
    assert reading_seconds(README) <= 300


def test_the_readme_lists_every_protocol():
    family = README.partition("| family |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", family)) == sorted(CATALOGUE)


def test_the_page_on_protocols_lists_every_protocol():
    page = (ROOT / "docs/concepts/protocols.md").read_text()
    assert re.findall(r"^\| `(\w+)(?:\(\w+\))?` \|", page, re.MULTILINE) == list(CATALOGUE)


def test_the_program_of_the_readme_has_five_lines():
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len([line for line in program.splitlines() if line]) == 5


@pytest.mark.parametrize("page", checked_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_have_25_words_or_fewer(page):
    text = page.read_text(encoding="utf-8")
    assert [sentence for sentence in sentences(text) if len(words(sentence)) > 25] == []


@pytest.mark.parametrize("page", checked_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_broken_into_a_list(page):
    """A line that begins as "1) gradients" is an item of a list in Markdown."""
    assert re.findall(r"^\d+\) .*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


PROSE = """\
# A heading without a full stop

```sh
no prose. here
```

A sentence of `two words or more` and **one in bold**. Another,
over two lines, e.g. with 0.5 s and
$a + b$! {py:obj}`paceline.train` begins a third [link](page.md "title").

| a table. | is none. |

- **Label:** an item
  of two lines
- "quoted words." Then more
<!-- a comment. -->
1. a number

    indented code. none
"""


def test_the_sentences_of_a_page_are_found():
    assert list(sentences(PROSE)) == [
        "A heading without a full stop",
        "A sentence of Code and **one in bold**.",
        "Another, over two lines, e.g with 0.5 s and Code!",
        "Code begins a third link.",
        "an item of two lines",
        '"quoted words.',
        "Then more",
        "a number",
    ]
    assert len(words("- a | b: 3.5 `c`")) == 4


@pytest.mark.parametrize("page", checked_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_code_is_run_or_marked(page):
    text = page.read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) == len(re.findall(r"^ *```(?:python|console|sh)$", text, re.MULTILINE))


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
