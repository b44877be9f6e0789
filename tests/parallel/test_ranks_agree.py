"""A verdict about kernels on one rank holds on all, or ends all."""

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessException

from tests.support import wants
from tests.support.fault_on_a_rank import fail_on_a_rank
from tests.support.processes import in_processes


@wants.collectives
def test_fault_on_one_rank_ends_all(tmp_path: Path) -> None:
    """With the names of the kernel and the rank; the next run knows of it before it begins."""
    with pytest.raises(ProcessException):
        in_processes(2, tmp_path, fail_on_a_rank, tmp_path)
    text = (tmp_path / "rank 1").read_text()
    assert text.startswith("rank 1: linear.triton") and "planted_kernel" in text
    (tmp_path / "meeting").unlink(missing_ok=True)
    assert sorted(in_processes(2, tmp_path, fail_on_a_rank, tmp_path)) == [0, 1]
