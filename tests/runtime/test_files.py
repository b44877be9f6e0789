"""Files that are replaced in one step."""

import os
from pathlib import Path

import pytest

from slipstream.runtime import files
from slipstream.runtime.files import write_text


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0])
def test_write_text_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        (tmp_path / "usual").touch()
        write_text(tmp_path / "made", "1")
        write_text(tmp_path / "made", "2")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    usual, made = ((tmp_path / name).stat().st_mode for name in ("usual", "made"))
    assert oct(made) == oct(usual)


def test_files_are_replaced_by_write_text_alone() -> None:
    """Another temporary file would be its owner's alone, and stay where a disk is full."""
    root = Path(str(files.__file__)).parents[1]
    found = [x.name for x in root.rglob("*.py") if "os.replace(" in x.read_text()]
    assert found == [Path(str(files.__file__)).name]
