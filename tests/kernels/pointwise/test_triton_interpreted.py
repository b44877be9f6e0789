"""Rotary and gated activations under Triton's interpreter: strides."""

import torch

from slipstream.ops.activation import geglu, swiglu
from slipstream.ops.rotary import rotary_embedding, rotary_tables
from tests.support.interpreted import error, interpreted


@interpreted
def test_triton_pointwise_takes_strides() -> None:
    wide = torch.randn(2, 3, 2050, requires_grad=True)
    for call in (swiglu, geglu):
        found = []
        for impl in ("triton", "eager"):
            y = call(*wide.chunk(2, -1), impl=impl)
            found.append([y, *torch.autograd.grad(y.sin().sum(), wide)])
        assert max(error(x, y) for x, y in zip(*found)) < 1e-5
    packed = torch.randn(2, 7, 3, 5, 12, requires_grad=True)
    tables = rotary_tables(torch.arange(20), 6)  # 3 pairs: not as many as a block has
    rows = [table[torch.randint(0, 20, (n, 7))] for n in (1, 2) for table in tables]
    cases = [(tables, None), (tables, torch.randperm(20)[:7]), (rows[:2], None), (rows[2:], None)]
    for (cos, sin), positions in cases:
        for interleaved in (False, True):
            found = []
            for impl in ("triton", "eager"):
                y = rotary_embedding(
                    packed[:, :, 1], cos, sin,
                    positions=positions, interleaved=interleaved, impl=impl,
                )  # fmt: skip
                found.append([y, *torch.autograd.grad(y.sin().sum(), packed)])
            assert max(error(x, y) for x, y in zip(*found)) < 1e-5
    check_heads()


def check_heads() -> None:
    """q, k and v of one tensor, whose gradients are written into one, against rotary_embedding."""
    from slipstream.kernels.elementwise.rotary import split_rotary

    wide, sizes = torch.randn(2, 7, 3 * 6 * 12, requires_grad=True), (3, 2, 1)
    for features, rows in ((12, 1), (8, 2)):
        cos, sin = rotary_tables(torch.randint(0, 20, (rows, 7)), features)
        qkv = wide.unflatten(-1, (-1, 12))[:, :, 5:11]
        dq, dk, dv = torch.randn(2, 7, 6, 12).split(sizes, 2)
        found = []
        for ours in (True, False):
            if ours:
                q, k, v = split_rotary(qkv, cos, sin, sizes, "triton")
            else:
                q, k, v = qkv.split(sizes, 2)
                q, k = (rotary_embedding(x, cos, sin, impl="eager") for x in (q, k))
            found.append([q, k, v, *torch.autograd.grad((q, k, v), wide, (dq, dk, dv))])
        assert max(error(x, y) for x, y in zip(*found)) < 1e-5
