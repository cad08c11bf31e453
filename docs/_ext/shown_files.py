"""Pages that show a file of the repository outside `docs`, with its links turned to the site's pages."""

import os
import re
from pathlib import Path

SHOWN = re.compile(r"^<!-- shows (\S+) -->\n")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def shown_file(page):
    """Return the file that a page shows; None for an ordinary page."""
    found = SHOWN.match(page.read_text(encoding="utf-8"))
    return (page.parent / found[1]).resolve() if found else None


def text_on_site(file, page, docs):
    """Return the text of a file, with links as seen from a page of the site.

    A link to a file without a page becomes plain text.

    Args:
        file: Markdown file of the repository.
        page: page of the site that shows it.
        docs: folder of the pages.
    """
    pages = {shown_file(each): each for each in docs.rglob("*.md")}

    def turned(link):
        image, text, target, anchor = link.groups(default="")
        place = (file.parent / target).resolve()
        place = pages.get(place, place)
        if not image and not (place.suffix == ".md" and place.is_relative_to(docs)):
            return f"`{text}`" if "/" in text else text
        return f"{image}[{text}]({Path(os.path.relpath(place, page.parent)).as_posix()}{anchor})"

    return LINK.sub(turned, file.read_text(encoding="utf-8"))


def show(app, name, source):
    """Replace the text of a page by the file that it shows."""
    page = Path(app.env.doc2path(name))
    file = shown_file(page)
    if file:
        app.env.note_dependency(str(file), docname=name)
        source[0] = text_on_site(file, page, Path(app.srcdir).resolve())


def setup(app):
    """Replace the texts before they are parsed."""
    app.connect("source-read", show)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
