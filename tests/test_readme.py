"""The README's Python runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    root = Path(__file__).parents[1]
    text = (root / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    missing = [x for x in targets if "://" not in x and not (root / x).exists()]
    assert not missing
