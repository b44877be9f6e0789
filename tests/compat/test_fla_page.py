"""docs/guides/migrate_fla.md is what tools/fla_page.py writes."""

from pathlib import Path

from tests.support.forked import run_code

ROOT = Path(__file__).parents[2]


def test_page_is_written_from_the_tables() -> None:
    made = run_code(ROOT / "tools/fla_page.py")
    assert made.returncode == 0, made.stderr
    page = (ROOT / "docs/guides/migrate_fla.md").read_text()
    assert made.stdout == page, "python tools/fla_page.py > docs/guides/migrate_fla.md"
