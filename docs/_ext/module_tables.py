"""Tables of all modules, written from their first lines when the site is built."""

import ast
import re
from pathlib import Path

PAGE = "concepts/architecture"
PLACE = "<!-- modules -->"
SOURCE = Path(__file__).parents[2] / "src" / "paceline"
FLOOR = re.compile(r"^\| ((?:`[\w/]+`(?:, )?)+) \|", re.MULTILINE)


def floors(page):
    """Return the folders and modules in the first column of the page's table of floors, lowest first."""
    return [name for row in FLOOR.findall(page) for name in re.findall(r"`([\w/]+)`", row)]


def modules():
    """Return the first line of each module that has one, by its path; the package itself is left out."""
    files = [path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem != "__init__"]
    docs = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in files}
    return {path.relative_to(SOURCE).as_posix(): doc.partition("\n")[0] for path, doc in docs.items() if doc}


def module_tables(page):
    """Return a table for each floor as Markdown, with the longest folder that a module is in as its floor."""
    names = floors(page)
    tables = {name: [] for name in names}
    for path, line in sorted(modules().items()):
        inside = [name for name in names if path.startswith(f"{name}/") or path == f"{name}.py"]
        tables.get(max(inside, key=len, default=""), []).append(f"| `{path}` | {line.replace('|', chr(92) + '|')} |")
    head = ["| module | what it has |", "| --- | --- |"]
    return "\n".join(line for name, rows in tables.items() for line in [f"### `{name}`", "", *head, *rows, ""])


def insert_tables(app, page, source):
    """Insert the tables into the page."""
    if page == PAGE:
        source[0] = source[0].replace(PLACE, module_tables(source[0]))


def setup(app):
    """Register the tables."""
    app.connect("source-read", insert_tables)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
