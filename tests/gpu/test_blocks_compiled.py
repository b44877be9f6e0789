"""Building blocks under torch.compile on a device: by their kernels and as they are chosen, forward
and backward, beside the same calls without it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.ops.activation import glu_linear
from slipstream.tools.catalog import Sample
from tests.support.operators import BLOCKS, Args, block_size, cast, leaves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# the kernels that a compiled graph has by itself, and those that it has if they are asked for
CHOSEN = ("rms_norm", "short_convolution", "short_convolution-packed", "token_shift-packed")
CHOSEN += ("cross_entropy-mean", "cross_entropy-none")
NAMED = ("rotary_embedding-positions", "swiglu", "glu_linear", "token_shift-state")
CASES = [
    pytest.param(block, impl, id=block.name)
    for block in BLOCKS
    for impl, names in ((None, CHOSEN), ("triton", NAMED))
    if block.name in names
]


def on_cuda(args: Args, dtype: torch.dtype) -> Args:
    moved = cast(args, dtype)
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in moved.items()}


def both(call: Any, args: Args) -> list[Tensor]:
    """Outputs and gradients."""
    args, inputs = leaves(args)
    outputs = call(args)
    total = torch.stack([x.float().square().sum() for x in outputs]).sum()
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize(("block", "impl"), CASES)
def test_block_on_cuda_compiles_fullgraph_without_recompiling(
    block: Sample, impl: str | None
) -> None:
    torch.compiler.reset()
    ours = replace(block, options={**block.options, "impl": impl})
    compiled = torch.compile(ours.call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, T in enumerate((15, 40)):
        args = on_cuda(block.inputs(block_size(T, 30)), torch.bfloat16)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = both(compiled, args)
        for x, y in zip(got, both(ours.call, args), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_update_moves_the_pool_on_under_compile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ops.short_convolution_update, fullgraph=True, backend="aot_eager")
    x, w = torch.randn(3, 30, device="cuda"), torch.randn(30, 4, device="cuda")
    pools = [torch.zeros(5, 30, 4, device="cuda") + 1 for _ in range(2)]
    slots = torch.tensor([4, -1, 0], device="cuda")
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x, pools[0], w, activation="silu", state_indices=slots)
            want = ops.short_convolution_update(
                x, pools[1], w, activation="silu", state_indices=slots
            )
            assert torch.equal(got, want)
    assert torch.equal(*pools)


@pytest.mark.parametrize("impl", [None, "eager"])
def test_token_shift_with_nan_around(impl: str | None) -> None:
    x = torch.randn(1, 3000, 1500, device="cuda", dtype=torch.bfloat16)
    x[:, 700:800] = torch.nan
    cu = torch.tensor([0, 0, 700, 800, 801, 3000, 3000], device="cuda")
    state = torch.randn(6, 1500, device="cuda", dtype=torch.bfloat16)
    given = {"initial_state": state, "cu_seqlens": cu, "output_final_state": True}
    for got, want in zip(
        ops.token_shift(x, **given, impl=impl), ops.token_shift(x, **given, impl="reference")
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ["swiglu", "squared_relu"])
def test_glu_linear_gradients_on_cuda(activation: str) -> None:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    gate, weight, bias = draw(300, 200), draw(70, 200), draw(70)
    up = draw(300, 200) if activation == "swiglu" else None
    given = [x for x in (gate, up, weight, bias) if x is not None]
    y = glu_linear(gate, up, weight, bias, activation=activation)
    h = ops.squared_relu(gate) if up is None else ops.swiglu(gate, up)
    want = torch.nn.functional.linear(h, weight, bias)
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    found = (torch.autograd.grad(x, given, dy) for x in (y, want))
    for got, good in zip(*found, strict=True):
        torch.testing.assert_close(got, good, rtol=2e-2, atol=2e-2)


def test_later_calls_are_played_and_give_the_same() -> None:
    """Five in a row: worked out, recorded, and then played."""
    x = torch.randn(2, 70, 3, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    cos, sin = ops.rotary_tables(torch.arange(70, device="cuda"), 64)
    w = torch.randn(192, 4, device="cuda").requires_grad_()
    cu = torch.tensor([0, 50, 140], device="cuda", dtype=torch.int32)
    calls = {
        "rotary_embedding-positions": lambda: [ops.rotary_embedding(x, cos, sin)],
        "swiglu": lambda: [ops.swiglu(x.flatten(2), x.flatten(2) + 1)],
        "relu2": lambda: [ops.squared_relu(x)],
        "shift": lambda: list(ops.token_shift(x.flatten(2), output_final_state=True)),
        "conv": lambda: [ops.short_convolution(x.flatten(2), w, activation="silu")[0]],
        "packed": lambda: [
            ops.short_convolution(x.reshape(1, 140, 192), w, w[:, 0], cu_seqlens=cu)[0]
        ],
    }
    for name, call in calls.items():
        first: list[Tensor] = []
        for _ in range(5):
            outs = call()
            leaves = [x, w] if name in ("conv", "packed") else [x]
            grads = torch.autograd.grad(sum(y.float().square().sum() for y in outs), leaves)
            made = [*outs, *grads]
            first = first or made
            for a, b in zip(made, first, strict=True):
                assert torch.equal(a, b), name
