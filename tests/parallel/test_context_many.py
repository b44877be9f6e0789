"""context_check.py in four and eight processes: uneven shards, and the same bits."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.support.scripts import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without collectives")
@pytest.mark.parametrize("ranks", [4, 8])
def test_results_and_bits_of_many_ranks(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    found = subprocess.run(
        [*command, "tests/parallel/context_check.py", "--seeds", "1"], cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(f"checked on {ranks} ranks") >= 33
