"""The public interface changes only where tests/public_api.txt changes with it."""

import pytest

from tests.support.forked import run_code
from tests.support.scripts import ROOT

OPERATORS = "operators of torch.library:"


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The snapshot, and the names of torch's operators: in a process of its own, since other tests
    register operators."""
    found = run_code(
        f"import sys, torch\nsys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "from api_snapshot import snapshot\nprint(snapshot(), end='')\n"
        f"print({OPERATORS!r}, *torch._C._dispatch_get_all_op_names(), end='')"
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split(OPERATORS)


def test_public_api_matches_snapshot(printed: list[str]) -> None:
    want = (ROOT / "tests/public_api.txt").read_text()
    assert printed[0] == want, "python tools/api_snapshot.py > tests/public_api.txt"


def test_registered_operators_are_private(printed: list[str]) -> None:
    names = [x for x in printed[1].split() if x.startswith("slipstream::")]
    assert len(names) > 50
    assert [x for x in names if not x.startswith("slipstream::_")] == []
