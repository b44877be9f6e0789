"""Every family of kernels has its equations, and every linear operator its paper's."""

from pathlib import Path

import slipstream.kernels
from slipstream.tools.catalog import OPERATORS, family

ROOT = Path(slipstream.kernels.__file__).parent


def test_families_have_their_equations() -> None:
    families = [x.parent for x in ROOT.glob("*/__init__.py") if x.parent.name != "primitives"]
    assert len(families) > 10
    assert [x.name for x in families if not (x / "MATH.md").is_file()] == []


def test_linear_operators_name_their_equation() -> None:
    text = (ROOT / "linear/MATH.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    named = {name.strip() for names, equation in rows for name in names.split(",") if equation}
    linear = {family(x.op) for x in OPERATORS if x.op.startswith(("chunk_", "fused_recurrent_"))}
    # of one channel: gated_scan/MATH.md
    assert linear - named == {"hgrn"}
