"""Losses of a vocabulary in two shards, on two processes, against the whole: by plain torch and by
the Triton kernels under Triton's interpreter."""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from slipstream.compiler import compiler_state
from slipstream.kernels.loss import shard
from slipstream.kernels.loss.eager import LossInputs
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import INTERPRETED
from tests.support import wants
from tests.support.interpreted import interpreted
from tests.support.sharded_losses import OPTIONS, RANKS, check


@wants.compiler
@pytest.mark.parametrize("fate", ["dies", "wrong"])
def test_failing_kernel_falls_back(
    fate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path))
    here = compiler_state.CompilerState("sm_90", "3.6.0", "1.2.3")
    monkeypatch.setattr(guarded_launch, "compiler_state", lambda device: here)

    def planted(plain: Callable) -> Callable:
        def launch(*args: Any) -> Any:
            if fate == "dies":
                raise guarded_launch.Unusable("planted_kernel: the compiler's process died")
            out = plain(*args)
            return out * 1.2 if isinstance(out, Tensor) else [x * 1.2 for x in out]

        return launch

    monkeypatch.setattr(shard, "_columns", planted(shard.eager_columns))
    monkeypatch.setattr(shard, "_dlogits", planted(shard.eager_dlogits))
    logits, target = torch.randn(6, 10), torch.randint(0, 20, (6,))
    terms, part = LossInputs(-100, 0.1, 0.0, 0.0, 1.0), shard.Shard(10, 10, 20, None)
    results = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for impl in ("eager", "triton|eager"):
            t = shard.RankRows(logits, target, terms, part)
            c = shard.columns(t, impl)
            rest = c.lse + 1, torch.ones(6), torch.empty(6, 10), impl
            results.append((*c, shard.dlogits(t, *rest)))
    assert all(map(torch.equal, *results))
    assert any("cross_entropy.shard" in str(x.message) for x in said)


def work(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    for options, reduction in zip(OPTIONS, ("mean", "none", "sum")):
        for impl in ("eager", "triton") if INTERPRETED else ("eager",):
            check(rank, options, reduction, impl)
    dist.destroy_process_group()


@interpreted
@wants.collectives
def test_sharded_losses_match_whole() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # of a process that has imported everything
        start_processes(work, (f"{folder}/store",), nprocs=RANKS, start_method="fork")


def test_chunks_of_rows_have_so_many_logits() -> None:
    hidden, weight = (torch.empty(n, 3, device="meta") for n in (5, 1 << 25))
    assert [x for x, _ in shard._chunks(hidden, weight, None)] == [
        *map(slice, (0, 2, 4), (2, 4, 6))
    ]
