"""Prose of a Markdown page: words, and sentences without code, tables and formulas."""

import re

WORDS_PER_MINUTE = 200
FENCE = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2[ ]*$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
BLOCK_MATH = re.compile(r"\$\$.*?\$\$", re.DOTALL)
NO_PROSE = re.compile(r"\s*(\||:::|\(\S+\)=$|={3,}$|-{3,}$)")  # rows of tables, directives, labels, rules
STARTS = re.compile(r"\s*(?:#{1,6} |[-*+] |\d+\. |: |> )")  # headings, items of lists, definitions, quotations
ONE_WORD = re.compile(r"(?:\{[\w:]+\})?(`+)(?:(?!\1).)+?\1|\$[^$\n]+\$", re.DOTALL)  # code, roles and formulas
LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)\s]*(?: \"[^\"]*\")?\)|\[[^\]]*\])?")
LABEL = re.compile(r"\A\*\*[^*]+\*\*:?|\A\*\*[^*]+:\*\*")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|Fig|Figs|eq|Eq|Sect|No|cf|approx)\.")
END = re.compile(r"(?<=[.!?])[\"')*_]*\s+")


def words(text):
    """Return the words of a text; signs without a letter or a digit are none."""
    return [word for word in text.split() if any(sign.isalnum() for sign in word)]


def reading_seconds(page):
    """Return the seconds that a reader needs for a page, with its code and its tables."""
    return 60 * len(words(COMMENT.sub("", page))) / WORDS_PER_MINUTE


def sentences(page):
    """Yield the sentences of a page; a piece of code and a formula in a sentence are one word each."""
    for paragraph in paragraphs(page):
        text = LINK.sub(r"\1", ONE_WORD.sub("Code", paragraph))
        text = LABEL.sub("", ABBREVIATION.sub(r"\1", text)).strip()
        yield from filter(words, END.split(text))


def paragraphs(page):
    """Yield headings, items of lists and other paragraphs, each in one line."""
    lines = []
    for line in [*BLOCK_MATH.sub("", COMMENT.sub("", FENCE.sub("", page))).splitlines(), ""]:
        begins = STARTS.match(line)
        if begins or not line.strip() or NO_PROSE.match(line) or (line.startswith("    ") and not lines):
            yield from [" ".join(lines)] if lines else []
            lines = []
        if begins:
            lines.append(line[begins.end() :].strip())
        elif line.strip() and not NO_PROSE.match(line) and (lines or not line.startswith("    ")):
            lines.append(line.strip())
