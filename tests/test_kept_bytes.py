"""The bytes that layers keep for the backward on a GPU, by tools/kept_bytes.py, do not grow."""

from pathlib import Path

import pytest

from slipstream.runtime.backends import HAVE_TRITON
from tests.support.forked import run_code

ROOT = Path(__file__).parents[1]
# bytes for a token and channel, and without what is made again
LIMITS = {
    "attention": (22.5, 22.5), "gated_deltanet": (25.5, 35.5), "kda": (28.5, 42.5),
    "mamba2": (30.5, 46.5), "rwkv7": (57.5, 57.5),
}  # fmt: skip


@pytest.mark.skipif(not HAVE_TRITON, reason="kernels are chosen, though none runs")
def test_layers_keep_no_more_than_they_did() -> None:
    done = run_code(ROOT / "tools/kept_bytes.py", *LIMITS)
    assert done.returncode == 0, done.stderr[-3000:]
    _, *lines = done.stdout.splitlines()
    rows = {name: (float(kept), float(without)) for name, kept, without in map(str.split, lines)}
    assert rows.keys() == LIMITS.keys()
    over = {name: row for name, row in rows.items() if any(map(float.__gt__, row, LIMITS[name]))}
    assert not over
