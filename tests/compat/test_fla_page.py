"""docs/guides/migrate_fla.md is what tools/fla_page.py writes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_is_written_from_the_tables() -> None:
    command = [sys.executable, str(ROOT / "tools/fla_page.py")]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    page = (ROOT / "docs/guides/migrate_fla.md").read_text()
    assert made.stdout == page, "python tools/fla_page.py > docs/guides/migrate_fla.md"
