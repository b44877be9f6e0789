"""The Triton losses under Triton's interpreter: small blocks, chunks; in two shards of a
vocabulary, on two processes, against the whole, by plain torch too."""

import itertools
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
from slipstream.ops.loss import cross_entropy, linear_cross_entropy
from slipstream.runtime import guarded_launch
from slipstream.runtime.backends import INTERPRETED
from slipstream.runtime.token_ids import WrongId, raise_pending
from tests.support import wants
from tests.support.interpreted import error, interpreted
from tests.support.sharded_losses import OPTIONS as SHARDED
from tests.support.sharded_losses import RANKS
from tests.support.sharded_losses import check as check_shards

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.2, "z_loss": 0.01},
    {"softcap": 2.0, "logit_scale": -0.5, "label_smoothing": 0.1, "z_loss": 0.1},
]


def grads(loss: Tensor, leaves: list[Tensor], scale: float) -> list[Tensor]:
    """Gradients of a scaled sum; twice, for the first may have used something up."""
    total = (scale * loss.double()).sum()
    first = [x.clone() for x in torch.autograd.grad(total, leaves, retain_graph=True)]
    for x, y in zip(first, torch.autograd.grad(total, leaves), strict=True):
        assert error(x, y) < 1e-6, (x, y)
    return first


def check(V: int, options: dict[str, Any], reduction: str, scale: float) -> None:
    logits, target = 4 * torch.randn(2, 5, V), torch.randint(0, V, (2, 5))
    target[0, 1] = target[1, 4] = -100
    logits[0, 1] = torch.inf
    logits[1, 0, : V - 1] = -torch.inf
    target[1, 0] = V - 1
    if options.get("label_smoothing"):
        logits[1, 0] = 1.0
    hidden, weight, bias = torch.randn(10, 6), torch.randn(V, 6), torch.randn(V)
    options = {**options, "reduction": reduction}
    cases: list[tuple[Any, list[Tensor], Tensor]] = [
        (cross_entropy, [logits], target),
        (linear_cross_entropy, [hidden, weight, bias], target.flatten()),
    ]
    for call, given, ids in cases:
        found = []
        for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            # the reference multiplies an ignored row's gradient by 0
            bound = torch.inf if impl == "triton" else 1e30
            leaves = [x.to(dtype).clamp(-bound, bound).requires_grad_() for x in given]
            tensors, rest = (
                (leaves[:1], leaves[2:]) if len(leaves) == 1 else (leaves[:2], leaves[2:])
            )
            loss = call(*tensors, ids, *rest, impl=impl, **options)
            found.append([loss.detach(), *grads(loss, leaves, scale)])
        for i, (x, y) in enumerate(zip(*found, strict=True)):
            e = error(x, y)
            assert e < 2e-5, (call, V, options, scale, i, e)


def check_targets() -> None:
    """Counted, and the first that is outside found, in one pass."""
    from slipstream.kernels.loss.triton import cross_entropy as launch

    target = torch.randint(0, 9, (9001,))
    target[::5] = -100
    live = (target != -100).sum()
    for size in (None, 9):
        assert float(launch.inverse_count(target, -100, size)) == float(1 / live)
        raise_pending()
    target[8000], target[8001], target[10] = -1, 30, -100
    launch.inverse_count(target, -100, 9)
    with pytest.raises(WrongId, match=r"target: id -1 at position \(8000,\)"):
        raise_pending()
    raise_pending()


def check_scaled() -> None:
    """The mean's float16 gradient: 1 / 64 of each of them is less than float16's steps."""
    target = torch.randint(0, 37, (64,))
    logits = 12 * torch.nn.functional.one_hot(target, 37).half()
    found = []
    for impl, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        x = logits.to(dtype).requires_grad_()
        loss = 65536 * cross_entropy(x, target, impl=impl)
        found.append(torch.autograd.grad(loss, x)[0].double())
    got, want = found
    assert float((got / want - 1).abs().max()) < 0.02


@interpreted
@pytest.mark.slow
def test_triton_losses_match_reference_in_small_blocks() -> None:
    from slipstream.kernels.loss import op
    from slipstream.kernels.primitives import logit_chunks

    for small in (False, True):
        if small:
            logit_chunks.TILES = ((1 << 62, 16, 4),)
            logit_chunks.CHUNK_BYTES, logit_chunks.ROW_MULTIPLE = 4 * 4 * 32, 4
        for V, options, reduction in itertools.product((1, 37), OPTIONS, ("mean", "sum", "none")):
            for scale in (1.0, -3.0):
                check(V, options, reduction, scale)
    target = torch.full((3,), -100)
    empty: list[tuple[Any, list[Tensor]]] = [
        (cross_entropy, []),
        (linear_cross_entropy, [torch.randn(9, 4)]),
    ]
    for call, first in empty:
        x = torch.randn(3, 4, requires_grad=True)
        loss: Tensor = call(x, *first, target, impl="triton")
        assert float(loss) == 0
        assert not torch.autograd.grad(loss, x)[0].any()
    check_targets()
    check_scaled()
    wide = torch.randn(10, 7).t()[:, ::2]  # no row's elements are adjacent
    ids = torch.randint(0, 5, (14,))[::2]
    want = torch.nn.functional.cross_entropy(wide, ids)
    assert error(cross_entropy(wide, ids, impl="triton"), want) < 1e-6
    hidden, weight, target = torch.randn(5, 4), torch.randn(6, 4), torch.tensor([0, 5, -100, 2, 3])
    for given in (False, True):
        args = (hidden, weight, None, target, None, -100, 0.1, 5.0, 0.01, 1.0, given, "triton")
        torch.library.opcheck(op._call_linear.overload, args)


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
    for options, reduction in zip(SHARDED, ("mean", "none", "sum")):
        for impl in ("eager", "triton") if INTERPRETED else ("eager",):
            check_shards(rank, options, reduction, impl)
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
