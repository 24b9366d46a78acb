"""The documentation site: `make docs` builds it into build/docs, and every warning is an error.

The pictures and the help of the commands are made when the site is built, by the programs in docs/pictures, so that they
cannot differ from the code. They land in docs/_generated, which git ignores.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "pictures"))

import commands  # noqa: E402
import concepts  # noqa: E402
import house  # noqa: E402

project = "AutoSAC"
author = "the AutoSAC developers"
version = release = installed_version("autosac")
copyright = "the AutoSAC developers, BSD-3-Clause"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_generated/*.md"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

suppress_warnings = ["myst.header"]  # autosac bench writes bench.md with headings of the third level

html_theme = "furo"
html_title = "AutoSAC"

default_role = "code"  # docstrings write `names` as Markdown does
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
copybutton_prompt_text = "$ "

generated = HERE / "_generated"
commands.write_all(generated)
concepts.draw_all(generated)
house.draw_all(generated)
