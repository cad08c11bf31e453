"""Numbers of a page: each is computed again from stored results, or stands in a text that is named as given."""

import re
from math import ceil

from papers.store import Store
from prose import FENCE

GIVEN_COLUMNS = ("figure", "paper", "bar", "question")  # those whose names begin so have no results of ours
NO_RESULTS = re.compile(
    r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`|95 % intervals?|2 / \(seeds \+ 1\)|"
    r"\b(?:figs?|eq|sect|tables?|theorem|lemma|equation|algorithm)\.?\s*\(?[\dIVX]+[\d.]*[a-d]?\)?"
    r"(?:(?:, | to | and )\(?[\dIVX]+[a-d]?\)?(?=[\s:,.;)|]))*",
    re.IGNORECASE,
)
NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d[\d.,]*")  # none that is a part of a name, as in ResNet-50
CELLS = re.compile(r"(?<!\\)\|")


def blocks(page):
    """Yield the paragraphs and rows of a page, on one line each, with the columns whose numbers are no results."""
    for part in re.split(r"\n\s*\n", FENCE.sub("", page)):
        if not part.startswith("|"):
            yield " ".join(part.split()), []
            continue
        head, _, *rows = part.splitlines()
        names = [name.strip() for name in CELLS.split(head)]
        given = [i for i, name in enumerate(names) if name.startswith(GIVEN_COLUMNS)]
        yield from ((" ".join(row.split()), given) for row in (head, *rows))


def without(block, texts):
    """Return a block with the texts left out, which may overlap; the bars between columns stay."""
    left_out = {i for text in texts for match in re.finditer(re.escape(text), block) for i in range(*match.span())}
    left_out -= {match.start() for match in CELLS.finditer(block)}
    return "".join(sign for i, sign in enumerate(block) if i not in left_out)


def check_page(path, computed, given):
    """Check that a page has all texts that were computed, and no number besides those and the given ones.

    Args:
        path: Markdown file of the page.
        computed: texts with numbers from stored results, each as it stands on the page.
        given: texts whose numbers are no stored results: settings, and what others measured. One that ends with "..."
            stands for the whole paragraph or row that begins so.
    """
    page = path.read_text()
    plain = " ".join(page.split())
    left_out = [text for text in [*computed, *(text.removesuffix("...") for text in given)] if text not in plain]
    assert not left_out, "the page does not have:\n" + "\n".join(left_out)
    starts = tuple(text.removesuffix("...") for text in given if text.endswith("..."))
    unknown = []
    for block, columns in blocks(page):
        rest = "" if starts and block.startswith(starts) else without(block, [*computed, *given])
        rest = "|".join("" if i in columns else cell for i, cell in enumerate(CELLS.split(rest)))
        unknown += [f"{match.group()}  in  {rest}" for match in NUMBER.finditer(NO_RESULTS.sub("", rest))]
    assert not unknown, "numbers neither computed nor given:\n" + "\n".join(unknown)


def check_tables(paper_tables, results):
    """Check that tables.md is made of the stored results, and names the series of every stored run."""
    text = "\n".join(paper_tables(results)) + "\n"
    assert text == (results / "tables.md").read_text()
    series = {
        name
        for file in results.glob("*.jsonl")
        for line in Store(file).lines()
        if isinstance(name := line.get("asked", {}).get("series"), str)
    }
    patterns = {name: re.sub(r"\\{\w+\\}", "[^|]+", re.escape(name)) for name in sorted(series)}  # with its {k}
    left_out = [name for name, pattern in patterns.items() if not re.search(rf"\| `?{pattern}`?(:[^|]*)? \|", text)]
    assert not left_out, f"tables.md leaves out {left_out}"


def span(values, digits):
    """Return the smallest and the largest value, or one number if they are written alike."""
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values)))
    return " to ".join(ends)


def at_most(value, digits):
    """Return a bound on a value, rounded up."""
    return f"{ceil(value * 10**digits - 1e-9) / 10**digits:.{digits}f}"
