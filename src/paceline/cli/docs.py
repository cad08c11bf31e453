"""`paceline docs`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import webbrowser
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import RunError, UsageError
from paceline.utils.files import writing

PACKAGE = Path(__file__).parents[1]
CLONE, WHEEL = PACKAGE.parents[1] / "docs", PACKAGE / "_site" / "docs"
NEEDED = ("sphinx", "furo", "myst_parser", "sphinx_copybutton", "matplotlib")


def docs(
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the place of the pages only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder to build in. Default: paceline in the user's cache.")] = None,
) -> None:
    """Build the documentation of this version and open it in a browser."""
    pages = sources()
    check_installed()
    index = build(pages, out or cache_folder())
    print(index)
    if not no_open and not webbrowser.open(index.as_uri()):
        print("paceline: no browser was found; open the file above in one", file=sys.stderr)


def sources() -> Path:
    """Return the folder of the pages.

    Raises:
        UsageError: this installation has none.
    """
    for place in (CLONE, WHEEL):
        if (place / "conf.py").exists():
            return place
    raise UsageError(
        f"this installation has no documentation in {WHEEL}; install paceline from a clone or a wheel, or read the "
        "folder docs of its repository"
    )


def check_installed() -> None:
    """Check that everything that builds the pages is installed.

    Raises:
        UsageError: a package is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"the documentation needs {', '.join(missing)}; run: pip install 'paceline[docs]'")


def cache_folder() -> Path:
    """Return the folder of the built pages of this version: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / f"docs-{version('paceline')}"


def build(pages: Path, folder: Path) -> Path:
    """Build the pages, or what has changed since the last time, and return the first page.

    Raises:
        RunError: the folder cannot be written, or a page cannot be built.
    """
    with writing(f"the documentation to {folder}", "; give another folder with out="):
        folder.mkdir(parents=True, exist_ok=True)
        if pages == WHEEL:  # an installed folder may be read-only, and the pictures are written beside the pages
            pages = shutil.copytree(WHEEL.parent, folder / "pages", dirs_exist_ok=True) / WHEEL.name
    print(f"paceline: building the documentation in {folder}", file=sys.stderr)
    places = (folder / "doctrees", pages, folder / "html")
    # -P: a file in the working folder may hide no module of Python.
    command = [sys.executable, "-P", "-m", "sphinx", "-q", "-d", *map(str, places)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RunError(f"the documentation was not built: {done.stdout.strip().splitlines()[-1]}")
    return folder.absolute() / "html" / "index.html"
