"""fla's cp_context: operators and convolutions on two ranks under fla's names, beside one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import slipstream.compat.fla
from slipstream.compat.fla.adaptor import CONTEXT, parse_signature
from slipstream.compat.fla.operators import OPERATORS
from tests.support.fla_inputs import K, T, inputs, member
from tests.support.processes import in_processes

OFFSETS = [0, 4, 9, T]
TAKE_CONTEXT = [x for x in OPERATORS if CONTEXT in parse_signature(x.signature).parameters]


def _convolution(
    x: Tensor, weight: Tensor, cu_seqlens: Any = None, cp_context: Any = None
) -> Tensor:
    modules = slipstream.compat.fla.modules
    if cp_context is None:
        return modules.convolution.causal_conv1d(x, weight, cu_seqlens=cu_seqlens)[0]
    return modules.causal_conv1d.cp.causal_conv1d_cp(x, weight, cp_context=cp_context)


def _token_shift(x: Tensor, cu_seqlens: Any = None, cp_context: Any = None) -> Tensor:
    modules = slipstream.compat.fla.modules
    if cp_context is None:
        return modules.token_shift.token_shift(x, cu_seqlens)
    return modules.token_shift_cp.token_shift_cp(x, cp_context)


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions with a cp_context, and their other arguments, in float64."""
    found: dict[str, Any] = {row.name: (member(row), inputs(row)) for row in TAKE_CONTEXT}
    modules = slipstream.compat.fla.modules
    torch.manual_seed(0)
    x = torch.randn(1, T, 2 * K)
    given: dict[str, Any] = {"x": x, "weight": torch.randn(2 * K, 3), "activation": "silu"}
    found["causal_conv1d"] = (modules.convolution.causal_conv1d, given)
    conv = modules.ShortConvolution(2 * K, 3).double()
    found["ShortConvolution"] = (conv, {"x": x})
    found["causal_conv1d_cp"] = (_convolution, {"x": x, "weight": given["weight"]})
    found["token_shift_cp"] = (_token_shift, {"x": x})
    return {
        name: (call, {n: x.double() if isinstance(x, Tensor) else x for n, x in arguments.items()})
        for name, (call, arguments) in found.items()
    }


def first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def run(call: Any, given: dict[str, Any], rank: int, **options: Any) -> list[Tensor]:
    """The output and the gradients of what has tokens, of a loss that weighs tokens of a rank."""
    given = {
        n: x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x
        for n, x in given.items()
    }
    o = first(call(**given, **options))
    weights = torch.linspace(-1, 1, T, dtype=torch.float64)[rank * o.shape[1] :][: o.shape[1]]
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.dim() > 2]
    loss = (o * weights.view(1, -1, *[1] * (o.dim() - 2))).sum()
    return [o.detach(), *torch.autograd.grad(loss, leaves)]


def compare(rank: int, found: Any) -> None:
    cu = torch.tensor(OFFSETS)
    build = slipstream.compat.fla.ops.cp.build_cp_context
    context = build(cu, dist.group.WORLD, conv1d_kernel_size=3)
    at = slice(rank * T // 2, (rank + 1) * T // 2)
    for name, (call, given) in calls().items():
        want = run(call, given, 0, cu_seqlens=cu)
        shares = {
            n: x[:, at] if isinstance(x, Tensor) and x.dim() > 2 else x for n, x in given.items()
        }
        got = run(call, shares, rank, cp_context=context)
        for i, (x, y) in enumerate(zip(got, want, strict=True)):
            off = float((x - y[:, at]).abs().max())
            if not off < 1e-9:
                found.put(f"{name}, rank {rank}: {i} is off by {off:.1e}")
    found.put(len(calls()))


def test_functions_with_a_context_equal_one_rank(tmp_path: Path) -> None:
    assert in_processes(2, tmp_path, compare) == [len(TAKE_CONTEXT) + 4] * 2


def describe(rank: int, found: Any) -> None:
    """fla 0.6.0's description of the same batch."""
    context = slipstream.compat.fla.ops.cp.build_cp_context(torch.tensor(OFFSETS), dist.group.WORLD)
    assert context.is_cp_enabled and context.cu_seqlens is not None
    counts = (context.pre_num_ranks, context.post_num_ranks, context.pre_num_conv_tokens)
    ends = (context.is_first_rank, context.is_last_rank)
    found.put((rank, context.cu_seqlens.tolist(), context.num_seqs, *counts, *ends))


def test_context_describes_a_rank(tmp_path: Path) -> None:
    first_rank, last_rank = sorted(in_processes(2, tmp_path, describe))
    assert first_rank == (0, [0, 4, 6], 2, 0, 1, 0, True, False)
    assert last_rank == (1, [0, 3, 6], 2, 1, 0, 2, False, True)


def test_contexts_without_a_group_and_refusals() -> None:
    cp = slipstream.compat.fla.ops.cp
    call, given = calls()["chunk_kda"]
    assert torch.equal(call(**given, cp_context=cp.FLACPContext())[0], call(**given)[0])
    with pytest.raises(TypeError, match="cp_context: want what"):
        call(**given, cp_context=object())
    with pytest.raises(ValueError, match="got a group without a plan"):
        call(**given, cp_context=cp.FLACPContext(group=object()))
    with pytest.raises(NotImplementedError, match="cp_context: fla's chunk_gla"):
        slipstream.compat.fla.ops.chunk_gla(*(given[n] for n in "qkvg"), cp_context=object())
    cu = torch.tensor(OFFSETS)
    with pytest.raises(NotImplementedError, match="layout: want contiguous"):
        cp.build_cp_context(cu, None, layout="zigzag")
    with pytest.raises(ValueError, match="layout: want contiguous or zigzag"):
        cp.build_cp_context(cu, None, layout="striped")
    with pytest.raises(ImportError, match="all_reduce_sum"):
        _ = cp.all_reduce_sum
