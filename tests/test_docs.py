"""The Python of the documentation runs as it stands. `make docs` checks the links."""

import importlib
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


def test_reference_has_every_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `make docs`, which takes minutes, what a new operator breaks."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(DOCS.parent / "tools"))
    reference = importlib.import_module("reference")
    reference.write(tmp_path)
    text = (tmp_path / "ops.rst").read_text()
    assert all(f"   {name}\n" in text for name, _ in reference.public("slipstream.ops"))
