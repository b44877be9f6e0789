"""Marks cells of tables that are numbers or sentences, for slipstream.css: a number stays on one
line, and a sentence is not squeezed to a word a line."""

import re
from typing import Any

from docutils import nodes

# 0.315 / 1.20, 4.6e-3, H200, 22 Nov
NUMBER = re.compile(r"[-\d.,e/ \u00a0]+|[A-Z]+\d+, \d+ [A-Z][a-z]+")
SENTENCE_CHARACTERS = 24


def mark(app: Any, document: nodes.document) -> None:
    for cell in document.findall(nodes.entry):
        text = cell.astext()
        if NUMBER.fullmatch(text):
            cell["classes"].append("number")
        elif len(text) > SENTENCE_CHARACTERS:
            cell["classes"].append("sentence")


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True}
