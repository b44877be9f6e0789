"""A verdict about kernels on one rank holds on all, or ends all."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.mark.skipif(not dist.is_available(), reason="torch without collectives")
def test_fault_on_one_rank_ends_all(tmp_path: Path) -> None:
    """With the names of the kernel and the rank; the next run knows of it before it begins."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_CACHE_DIR": str(tmp_path)}
    begin = time.monotonic()
    done = subprocess.run(
        [*run, "-m", "tests.support.fault_on_a_rank"],
        capture_output=True, text=True, env=env, timeout=60,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "NotImplementedError: rank 1: linear.triton" in text and "planted_kernel" in text
    again = subprocess.run(
        [*run, "-m", "tests.support.fault_on_a_rank"],
        capture_output=True, text=True, env=env, timeout=60,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert time.monotonic() - begin < 120
