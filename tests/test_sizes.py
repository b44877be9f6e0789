"""tools/sizes.py: how long files may be."""

from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
KERNEL = "def {}_kernel():\n    gl.warp_specialize([])\n\n\n"


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import sizes

    return sizes


@pytest.mark.parametrize(
    ("source", "most"),
    [
        ("", 500),
        (KERNEL.format("one"), 1000),
        (KERNEL.format("one") + KERNEL.format("other"), 500),
        ("def one_kernel():\n    pass\n", 500),
    ],
    ids=["host", "partitions", "two kernels", "no partitions"],
)
def test_length_of_a_file(sizes: ModuleType, tmp_path: Path, source: str, most: int) -> None:
    path = tmp_path / "file.py"
    for lines in (most, most + 1):
        path.write_text(source + "x = 1\n" * (lines - source.count("\n")))
        found = sizes.too_long(path)
        assert found == ([] if lines == most else [f"{path}: {lines} lines, at most {most}"])
