"""The documentation's Python runs as it stands; links of pages beside the site lead to files. `make
docs` checks the links of the site. Files that comments, docstrings and pages name are there. Every
family of kernels has its equations, and every linear operator its paper's."""

import importlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
import torch

from slipstream.tools.catalog import OPERATORS, family
from tests.support.scripts import ROOT, script

DOCS = ROOT / "docs"
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


README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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
    assert len(pages) > 10 and [x for x in pages if f"docs/guides/{x}.md" not in README] == []


# `make docs` checks those of the site
LINKING = [*ROOT.glob("*.md"), *(ROOT / x / "README.md" for x in ("examples", "bench"))]
LINKING += (ROOT / "slipstream").rglob("*.md")


@pytest.mark.parametrize("page", [str(x.relative_to(ROOT)) for x in sorted(LINKING)])
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    missing = [x for x in targets if "://" not in x and not ((ROOT / page).parent / x).exists()]
    assert not missing


NAMED = re.compile(r"(?<![\w/.<*{-])((?:[\w-]+/)*[\w-]+\.(?:py|md))\b")
# files that are written, or other packages'
ELSEWHERE = {"modeling_slipstream.py", "fla/layers/gdn2.py", "ssu_dispatch.py"}


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.string.startswith(('"""', 'r"""')):
            yield token.start[0], token.string


def _is_placeholder(name: str) -> bool:
    return PurePosixPath(name).stem.isupper()  # NAME.py


def test_named_files_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    paths = listed.stdout.split()
    # a path as any folder sees it: tests/conftest.py, conftest.py
    known = {path[i:] for path in paths for i in (0, *(m.end() for m in re.finditer("/", path)))}
    # both keep the names of their time
    read = [p for p in paths if not p.startswith("docs/dev/tried/") and p != "CHANGELOG.md"]
    assert len(read) > 700
    missing = [
        f"{path}:{line}: {name}"
        for path in read
        for line, text in _prose(ROOT / path)
        for name in NAMED.findall(text)
        if name not in known | ELSEWHERE and not _is_placeholder(name)
    ]
    assert missing == []


KERNELS = ROOT / "slipstream/kernels"


def test_families_have_their_equations() -> None:
    families = [x.parent for x in KERNELS.glob("*/__init__.py") if x.parent.name != "primitives"]
    assert len(families) > 10
    assert [x.name for x in families if not (x / "MATH.md").is_file()] == []


def test_linear_operators_name_their_equation() -> None:
    text = (KERNELS / "linear/MATH.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    named = {name.strip() for names, equation in rows for name in names.split(",") if equation}
    linear = {family(x.op) for x in OPERATORS if x.op.startswith(("chunk_", "fused_recurrent_"))}
    # of one channel: gated_scan/MATH.md
    assert linear - named == {"hgrn"}
