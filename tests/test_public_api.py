"""The public interface changes only where tests/public_api.txt changes with it."""

from pathlib import Path

from tests.support.forked import run_code

ROOT = Path(__file__).parents[1]


def test_public_api_matches_snapshot() -> None:
    # a process of its own: other tests register operators of their own
    found = run_code(ROOT / "tools/api_snapshot.py")
    assert found.returncode == 0, found.stderr
    want = (ROOT / "tests/public_api.txt").read_text()
    assert found.stdout == want, "python tools/api_snapshot.py > tests/public_api.txt"


def test_registered_operators_are_private() -> None:
    listed = "import torch, slipstream.models\nprint(*torch._C._dispatch_get_all_op_names())"
    found = run_code(listed)
    names = [x for x in found.stdout.split() if x.startswith("slipstream::")]
    assert len(names) > 50, found.stderr
    assert [x for x in names if not x.startswith("slipstream::_")] == []
