"""Training over four processes follows one process's loss curve."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch without collectives")
def test_200_steps_follow_one_process() -> None:
    """FSDP2 x context parallelism x checkpointing; rounding alone parts them, more and more."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    found = subprocess.run(
        [*command, "-m", "tests.support.loss_curve", "200"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    steps = re.findall(r"^step \d+ (\S+) (\S+)$", found.stdout, re.M)
    curves = [(float(one), float(many)) for one, many in steps]
    assert len(curves) == 200
    assert curves[0][0] > 4 and curves[-1][0] < 2  # it has learnt what there is
    for step, (one, many) in enumerate(curves):
        assert many == pytest.approx(one, rel=1e-4 if step < 50 else 1e-2), step
