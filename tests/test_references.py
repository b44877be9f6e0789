"""Files that comments, docstrings and the documentation name are there."""

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
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
