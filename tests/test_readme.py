"""The README's Python runs as it stands there; links of pages beside the site lead to files."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_readme_has_snippets() -> None:
    assert SNIPPETS


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet: str) -> None:
    names: dict = {}
    exec(compile(snippet, "README.md", "exec"), names)
    floating = [x for x in names.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert floating
    assert all(torch.isfinite(x).all() for x in floating)


def test_readme_links_every_guide() -> None:
    """But for the pages behind those on transformers, migrating and examples."""
    pages = re.findall(r"^guides/(\w[\w-]*)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    pages = [x for x in pages if not x.startswith(("migrate_", "transformers_", "examples"))]
    assert len(pages) > 10 and [x for x in pages if f"docs/guides/{x}.md" not in TEXT] == []


# `make docs` checks those of the site
PAGES = [*ROOT.glob("*.md"), *(ROOT / x / "README.md" for x in ("examples", "bench"))]
PAGES += (ROOT / "slipstream").rglob("*.md")


@pytest.mark.parametrize("page", [str(x.relative_to(ROOT)) for x in sorted(PAGES)])
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [x for x in targets if "://" not in x and not ((ROOT / page).parent / x).exists()]
    assert not missing
