"""docs/guides/migrate_fla.md is what tools/fla_page.py writes."""

import re
from pathlib import Path

import pytest

from tests.support.forked import run_code

ROOT = Path(__file__).parents[2]


def test_page_is_written_from_the_tables() -> None:
    made = run_code(ROOT / "tools/fla_page.py")
    assert made.returncode == 0, made.stderr
    page = (ROOT / "docs/guides/migrate_fla.md").read_text()
    assert made.stdout == page, "python tools/fla_page.py > docs/guides/migrate_fla.md"


def test_page_names_the_layers_of_models_that_are_converted() -> None:
    """Mamba-3's and the preconditioned ones' came without their rows."""
    pytest.importorskip("transformers")
    from slipstream.models import MIXERS
    from slipstream.models.convert import FAMILIES

    page = (ROOT / "docs/guides/migrate_fla.md").read_text()
    for mixer in MIXERS.keys() & FAMILIES.keys():
        assert re.search(rf"^\| `\w+` \| `\w+` \| `{mixer}` \|$", page, re.M), mixer
