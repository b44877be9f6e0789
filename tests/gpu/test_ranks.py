"""Several GPUs: context parallelism and shares of a vocabulary over NCCL."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from slipstream.parallel import ContextParallel
from slipstream.tools.catalog import Shape
from tests.gpu.waiting import waiting_is_an_error
from tests.support.sharded_losses import OPTIONS, RANKS, check, found

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < RANKS or not dist.is_nccl_available(),
    reason="needs two CUDA devices and NCCL",
)


# ---- Context parallelism on two GPUs over NCCL: results, bits, and nothing that waits for a
# device.


NAMES = (
    "chunk_simple_gla",
    "chunk_gla",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_rwkv7",
    "chunk_hgrn",
    "selective_scan",
    "short_convolution",
    "attention",
)


@pytest.mark.parametrize("work", ["results_and_bits", "without_waiting"])
def test_two_gpus(work: str, tmp_path: Path) -> None:
    spawn(_on_rank, (tmp_path / "store", work), nprocs=RANKS)


def _on_rank(rank: int, path: Path, work: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    _script().compile_ahead(NAMES)
    for name in NAMES:
        globals()[work](name)
        print(work, name, "passed", flush=True)
    dist.destroy_process_group()


def _script() -> Any:
    """It takes the benchmark's device, and so wants a rank to have chosen its own."""
    return importlib.import_module("tests.parallel.context_check")


def results_and_bits(name: str) -> None:
    """Random packings cut anywhere give one GPU's results; with fixed segments the bits of one."""
    assert _script().check_one(name, 0) == []


def without_waiting(name: str) -> None:
    script, tokens = _script(), 1024
    op = script.sample(name)
    args = op.inputs(Shape(B=1, T=tokens, H=2, K=64, V=64), torch.device("cuda"))
    for segments in (None, 256):
        options: Any = {"context": ContextParallel(segment_tokens=segments)}
        mine = script.parts(op, args, 0, tokens)
        with torch.no_grad():
            dout = torch.randn_like(script.first(op, mine, **options))
        for _ in range(3):  # compiled, recorded, played
            script.backward(op, mine, dout, **options)
        with waiting_is_an_error():
            script.backward(op, mine, dout, **options)
        torch.cuda.synchronize()


# ---- Losses of a vocabulary in two shards, on two GPUs over NCCL, against the whole in float64.


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
    with waiting_is_an_error():
        got = found(given, target, group=dist.group.WORLD)
    # no kernel computes in float64
    want = found([x.double() for x in (hidden, weight, bias)], target, impl="eager")
    wanted = [want[0], want[1], want[2][mine], want[3][mine]]
    for x, y, most in zip(got, wanted, (1e-4, 8e-3, 8e-3, 8e-3)):
        assert (x.double() - y).norm() < most * y.norm()
