"""Files of the package, and the definitions in them."""

import ast
from functools import cache
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def name_of(path):
    """Return the path of a module without the folder of the package and the suffix."""
    return path.relative_to(SOURCE).with_suffix("").as_posix()


@cache
def tree_of(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions(kinds):
    """Yield the file of each definition of some kinds, and the definition."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kinds):
                yield path, node
