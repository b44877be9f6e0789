"""The Python of the documentation runs as it stands. `make docs` checks the links."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted(
    str(x.relative_to(DOCS)) for x in DOCS.rglob("*.md") if SNIPPET.search(x.read_text())
)


def test_docs_have_snippets() -> None:
    assert {"quickstart.md", "concepts.md", "guides/decoding.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str) -> None:
    """The snippets of a page in one namespace, as a reader pastes them."""
    torch.manual_seed(0)
    names: dict = {}
    for i, snippet in enumerate(SNIPPET.findall((DOCS / page).read_text())):
        exec(compile(snippet, f"{page}, snippet {i + 1}", "exec"), names)
