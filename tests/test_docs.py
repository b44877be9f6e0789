"""The Python of the documentation runs as it stands. `make docs` checks the links."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from tests.support.scripts import script

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


CODE_COLUMNS = 88  # of the site at desktop width


def test_code_fits_the_page() -> None:
    pages = [DOCS.parent / "README.md", *(x for x in DOCS.rglob("*.md") if "_build" not in x.parts)]
    blocks = re.compile(r"^```(?:python|console|shell|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    wide = {
        f"{page.name}: {line}"
        for page in pages
        if "dev" not in page.relative_to(DOCS.parent).parts
        for block in blocks.findall(page.read_text(encoding="utf-8"))
        for line in block.splitlines()
        if len(line) > CODE_COLUMNS
    }
    assert not wide


def test_pages_have_no_math_markup() -> None:
    """The site renders no LaTeX, so that readers would see the markup itself."""
    code = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
    pages = [x for x in DOCS.rglob("*.md") if "_build" not in x.parts]
    marked = {
        f"{page.name}: {found[0]}"
        for page in pages
        for found in re.finditer(
            r"\$[^$\n]+\$|\\[a-z]+\{|\\\(", code.sub("", page.read_text(encoding="utf-8"))
        )
    }
    assert pages and not marked


TRIED = sorted((DOCS / "dev/tried").glob("*.md"))


@pytest.mark.parametrize("page", [x.name for x in TRIED])
def test_tried_ideas_are_one_row_each(page: str) -> None:
    """Rejected ideas first, the newest on top; a row has a date, an idea, a figure, a commit."""
    text = (DOCS / "dev/tried" / page).read_text(encoding="utf-8")
    rejected, accepted = re.split(r"^## Accepted", text, flags=re.MULTILINE)
    assert "\n## Rejected" in rejected
    row = re.compile(r"\| (\d{4}-\d\d-\d\d) \| [^|]{9,} \| [^|]{9,} \| `[0-9a-f]{8}` \|")
    for part in (rejected, accepted):
        found = [x for x in part.splitlines() if x.startswith("|")][2:]
        dates = [match[1] for x in found if (match := row.fullmatch(x))]
        assert len(dates) == len(found) > 0
        assert dates == sorted(dates, reverse=True)


def test_changelog_and_notes_for_maintainers_are_short() -> None:
    assert len((DOCS.parent / "CHANGELOG.md").read_text().splitlines()) <= 120
    assert sum(len(x.read_text().splitlines()) for x in (DOCS / "dev").rglob("*.md")) <= 2000


def test_quickstart_names_every_mixer() -> None:
    pytest.importorskip("transformers")
    mixers = importlib.import_module("slipstream.models.config").MIXERS
    text = (DOCS / "quickstart.md").read_text()
    assert [x for x in mixers if f"`{x}`" not in text] == []


def test_concepts_name_every_recurrence() -> None:
    from slipstream import ops

    text = (DOCS / "concepts.md").read_text()
    names = [x.removeprefix("chunk_") for x in dir(ops) if x.startswith("chunk_")]
    assert [x for x in names if not re.search(rf"\b{x}\b", text)] == []


def test_architecture_names_every_family() -> None:
    text = (DOCS / "architecture.md").read_text()
    families = [x.parent.name for x in DOCS.parent.glob("slipstream/kernels/*/__init__.py")]
    assert len(families) > 8
    assert [x for x in families if f"`{x}`" not in text and f"kernels/{x}`" not in text] == []


def test_reference_has_every_operator(tmp_path: Path) -> None:
    """The part of `make docs`, which takes minutes, that a new operator breaks."""
    pytest.importorskip("transformers")
    reference = script("tools/reference")
    reference.write(tmp_path)
    text = (tmp_path / "ops.rst").read_text()
    assert all(f"   {name}\n" in text for name, _ in reference.public("slipstream.ops"))
