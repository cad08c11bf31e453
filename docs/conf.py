"""Settings of the documentation: Sphinx with MyST pages and the furo theme."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "paceline"
author = "the paceline authors"
copyright = "2026, the paceline authors"
version = release = installed_version("paceline")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_parser",
    "sphinx_copybutton",
    "command_line_page",
    "module_tables",
    "protocol_pictures",
    "public_names",
    "record_fields",
    "shown_files",
    "string_tables",
]
html_theme = "furo"
html_title = "paceline"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
exclude_patterns = ["_build", "README.md"]

nitpicky = True
default_role = "py:obj"
OTHERS = "torch|numpy|collections|pathlib|typing|types|enum|contextlib|math|np|nn|dist|Tensor|Path|Console|Dataset"
nitpick_ignore_regex = [
    (r"py:.*", rf"({OTHERS})\b.*"),
    (r"py:.*", r".*\.Count"),
    (r"py:class", r"msgspec\.Meta"),  # bounds of the values in a message
    (r"py:class", r"DataLoader"),
    (r"py:class", r"Model"),  # the type of the model that balance returns
]

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
smartquotes = False  # quotes in docstrings are code
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"
