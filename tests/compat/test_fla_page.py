"""docs/guides/migrate_fla.md has what tools/fla_page.py makes of the tables of compat.fla."""

import re

import pytest

import slipstream.compat.fla
from tests.support.forked import run_code
from tests.support.scripts import ROOT, script

fla_page = script("tools/fla_page")
TEXT = fla_page.PAGE.read_text("utf-8")


def test_page_is_written_from_the_tables() -> None:
    names = [x[2] for x in fla_page.PART.finditer(TEXT)]
    assert sorted(names) == sorted(x.__name__ for x in fla_page.PARTS)
    # a process of its own: other tests import modules that the page would list
    made = run_code(ROOT / "tools/fla_page.py", "--check")
    assert made.returncode == 0, made.stderr


def test_changed_part_is_seen() -> None:
    changed = TEXT.replace("`chunk_gsa`", "`chunk_none`")
    assert changed != TEXT and "chunk_none" not in fla_page.written(changed)


def test_page_names_the_release_that_it_follows() -> None:
    version = slipstream.compat.fla.__version__
    assert f"fla-core {version}," in TEXT and f"flash-linear-attention=={version} " in TEXT


def test_page_names_the_layers_of_models_that_are_converted() -> None:
    """Mamba-3's came without its row."""
    pytest.importorskip("transformers")
    from slipstream.models import MIXERS
    from slipstream.models.convert import FAMILIES

    for mixer in MIXERS.keys() & FAMILIES.keys():
        assert re.search(rf"^\| `\w+` \| `\w+` \| `{mixer}` \|$", TEXT, re.M), mixer
