"""Sphinx configuration: `make docs` builds docs/_build/html, and fails at any warning."""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext"), str(DOCS.parent / "tools")]

import reference  # noqa: E402  writes the pages of docs/api that follow from the code

import slipstream  # noqa: E402

project = "Slipstream"
author = "The Slipstream authors"
copyright = "2026, The Slipstream authors"
version = release = slipstream.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "docstrings",
    "cells",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext"]
nitpicky = True
smartquotes = False  # --option is not a dash

# docstrings state shapes and dtypes; annotations would repeat "Tensor" for every argument
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch.nn.Module.forward
autosummary_generate = True
autosummary_ignore_module_all = False
templates_path = ["_templates"]
python_maximum_signature_line_length = 88

myst_heading_anchors = 3
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"Slipstream {release}"
html_static_path = ["_static"]
html_css_files = ["slipstream.css"]

reference.write(DOCS / "api")
