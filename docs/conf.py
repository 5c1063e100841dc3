"""Settings of Sphinx. `make docs` builds docs/ into out/docs, and a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from inventories import write_inventories  # noqa: E402

import kernels  # noqa: E402

project = "adasum"
author = copyright = "the adasum maintainers"
release = version = kernels.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "mathml",
    "public_names",
    "readme_page",
]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
# Browsers show MathML themselves: formulas need no script, and no network.
html_math_renderer = "mathml"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"adasum {release}"
html_copy_source = False
html_show_sphinx = False

# Docstrings are in Google's style, with `code` in single backticks.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
# Each has a module in adasum/integrations, which is documented without them.
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]
autodoc_default_options = {"members": True}
smartquotes = False
# Pages link to docs/evidence where they cite its numbers.
suppress_warnings = ["toc.not_included"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
intersphinx_mapping = write_inventories(ROOT / "out" / "inventories")
# Types in signatures link to their page. Every name that a package exports must have one, and these
# of others.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(?!(?:adasum|collectives|kernels|collections\.abc)\.\w+$|torch\.(?:Tensor|dtype|Size)$).*",
    )
]
