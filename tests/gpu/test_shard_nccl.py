"""Losses of a vocabulary in two shards, on two GPUs over NCCL, against the whole in float64."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tests.support.sharded_losses import OPTIONS, RANKS, check, found

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS or not dist.is_nccl_available(),
        reason="needs two CUDA devices and NCCL",
    ),
]
ROWS, WIDTH, VOCABULARY = 1000, 512, 2 * 12_345


def test_shards_of_two_gpus_match_the_whole(tmp_path: Path) -> None:
    spawn(_work, (tmp_path / "store",), nprocs=RANKS)


def _work(rank: int, path: Path) -> None:
    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    for options, reduction in zip(OPTIONS, ("mean", "none", "sum")):
        check(rank, options, reduction, "triton")
    _large(rank)
    dist.destroy_process_group()


def _large(rank: int) -> None:
    """In bf16, and with nothing that waits for the device."""
    hidden = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    weight = (torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5).bfloat16()
    target = torch.randint(0, VOCABULARY, (ROWS,))
    bias = torch.randn(VOCABULARY).bfloat16()
    mine = slice(rank * VOCABULARY // RANKS, (rank + 1) * VOCABULARY // RANKS)
    given = [hidden, weight[mine], bias[mine]]
    found(given, target, group=dist.group.WORLD)
    torch.cuda.set_sync_debug_mode("error")
    got = found(given, target, group=dist.group.WORLD)
    torch.cuda.set_sync_debug_mode("default")
    # no kernel computes in float64
    want = found([x.double() for x in (hidden, weight, bias)], target, impl="eager")
    wanted = [want[0], want[1], want[2][mine], want[3][mine]]
    for x, y, most in zip(got, wanted, (1e-4, 8e-3, 8e-3, 8e-3)):
        assert (x.double() - y).norm() < most * y.norm()
