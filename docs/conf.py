"""Configuration of the documentation site: `make docs` writes it to build/docs. docs/project/site.md explains how."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generate  # noqa: E402
import inventories  # noqa: E402

import rlframe  # noqa: E402
from rlframe.cli.help import field_comments  # noqa: E402

generate.write_all()

project = "rlframe"
author = "The rlframe authors"
copyright = "The rlframe authors. Apache-2.0"
version = release = rlframe.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_generated"]
templates_path: list[str] = []
default_role = "literal"  # docstrings write `code` as Markdown does

# Commands in notebooks print their progress as lines. A kernel sets TERM when it starts; this script changes it later.
_startup = ROOT / "build/ipython/profile_default/startup/term.py"
_startup.parent.mkdir(parents=True, exist_ok=True)
_startup.write_text('import os\n\nos.environ["TERM"] = "dumb"\n')
os.environ["IPYTHONDIR"] = str(ROOT / "build/ipython")

# The pages of docs/learn are notebooks. The build executes them, and an error ends the build.
nb_execution_mode = "force"
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

autodoc_mock_imports = ["launchpad", "reverb"]  # they need Python 3.10
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False

intersphinx_mapping = inventories.write(ROOT / "build/inventories")
intersphinx_timeout = 1

html_theme = "furo"
html_title = "rlframe"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_baseurl = ""

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Append the fields of a dataclass with their comments. Show indented text unchanged."""
    for i in range(len(lines) - 2):
        is_heading = lines[i] in ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:")
        if lines[i].endswith(":") and not is_heading and not lines[i + 1] and lines[i + 2].startswith("    "):
            lines[i] += ":"
    if what == "class" and dataclasses.is_dataclass(obj):
        comments = field_comments(obj)
        names = (field.name for field in dataclasses.fields(obj) if field.name in comments)
        lines.extend(["", *(f":param {name}: {escape(comments[name])}" for name in names), ""])


def escape(text: str) -> str:
    """Return a comment as reStructuredText."""
    return re.sub(r"([|*\\_])", r"\\\1", text)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", prepare_docstring)
