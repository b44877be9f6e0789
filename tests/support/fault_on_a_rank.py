"""Kernels that fail on rank 1 alone, in a loop in which all ranks add something up."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slipstream.runtime import guarded_launch

KIND = ("linear.triton", "delta", torch.bfloat16, 128)


def fail_on_a_rank(rank: int, folder: Path, found: Any) -> None:
    """Leaves the text of what it raises in the folder: of two ranks that fail one is reported."""
    os.environ["SLIPSTREAM_CACHE_DIR"] = str(folder)
    here = guarded_launch.CompilerState("sm_90", "3.6.0", "1.2.3")
    guarded_launch.compiler_state = lambda device: here
    for step in range(1000):
        try:
            with guarded_launch.Guard("triton|eager", torch.device("cpu"), lambda: KIND) as usable:
                if usable and rank == 1 and step == 3:
                    raise guarded_launch.Unusable("planted_kernel: the compiler's process died")
        except NotImplementedError as error:
            (folder / f"rank {rank}").write_text(str(error))
            raise
        dist.all_reduce(torch.ones(1))
    found.put(rank)
