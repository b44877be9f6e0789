"""Groups of processes on a CPU: forks of one that has imported torch and the package."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import start_processes

# what most of a process's time went to, each import once for all groups of a test process
PRELOADED = ["torch.distributed.fsdp", "slipstream.models", "tests.support.operators"]


def _in_process(rank: int, file: str, ranks: int, what: Callable[..., None], args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    try:
        what(rank, *args)
        # else threads of gloo may free tensors while the interpreter ends: an abort
        dist.barrier()
    finally:
        dist.destroy_process_group()


def in_processes(ranks: int, folder: Path, what: Callable[..., None], *args: Any) -> list[Any]:
    """The objects that `what(rank, *args, queue)` puts into the queue in a group of processes."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.SimpleQueue()
    given = (str(folder / "meeting"), ranks, what, (*args, queue))
    start_processes(_in_process, given, nprocs=ranks, start_method="forkserver")
    found = []
    while not queue.empty():
        found.append(queue.get())
    return found
