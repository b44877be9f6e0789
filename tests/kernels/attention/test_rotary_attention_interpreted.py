"""Attention with a rotary embedding inside, by Triton's interpreter, against plain torch."""

from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.rotary import softmax_of_rotated
from slipstream.kernels.elementwise.rotary import rotary_reference
from slipstream.layers import Attention
from slipstream.layers.base import NormalLinear
from tests.support.interpreted import error, interpreted


def reference(qkv: Any, tables: Any, cu: Any, sizes: Any, options: AttentionOptions) -> Any:
    q, k, v = qkv.split(sizes, 2)
    cos, sin = (x.double()[:, :, None] for x in tables)
    q, k = (rotary_reference(x, cos, sin, False) for x in (q, k))
    return softmax_reference(AttentionInputs(q, k, v, cu_q=cu, cu_k=cu), options)[0]


def check_operator() -> None:
    torch.manual_seed(0)
    for packed, half, in_place in product((False, True), (8, 5), (False, True)):
        B, T, sizes, D = 1 if packed else 2, 21, (4, 2, 2), 16
        cu = torch.tensor([0, 9, 21], dtype=torch.int32) if packed else None
        options = AttentionOptions(D**-0.5, 6, 0, 0.0, 0.0)
        angle = torch.randn(B, T, half)
        tables = angle.cos(), angle.sin()
        given = torch.randn(B, T, sum(sizes), D)
        leaf = given.clone().requires_grad_()
        qkv = leaf * 1
        o = softmax_of_rotated(qkv, *tables, cu, sizes, options, "triton", in_place)
        heads = sizes[0] + sizes[1]
        assert torch.equal(qkv[:, :, :heads], given[:, :, :heads]) != in_place
        assert torch.equal(qkv[:, :, heads:], given[:, :, heads:])
        do = torch.randn_like(o)
        (grad,) = torch.autograd.grad(o, leaf, do)
        exact = given.double().requires_grad_()
        want = reference(exact, tables, cu, sizes, options)
        (right,) = torch.autograd.grad(want, exact, do.double())
        errors = error(o, want), error(grad, right)
        assert max(errors) < 1e-5, (packed, half, in_place, errors)


def run(layer: Any, x: torch.Tensor, inside: bool) -> list[Any]:
    layer._only_rotates = lambda qkv: inside
    x.requires_grad_()
    y = layer(x)[0]
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]


def check_layer() -> None:
    """As it is without a rotation inside of attention, also where the projection has a hook."""
    torch.manual_seed(0)
    layer, x = Attention(64, 4, num_kv_heads=2), torch.randn(2, 19, 64)
    seen: list[Any] = []

    want = run(layer, x, False)
    assert max(map(error, run(layer, x, True), want)) < 1e-5
    layer.qkv_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    assert max(map(error, run(layer, x, True), want)) < 1e-5
    assert torch.equal(seen[0], layer.qkv_proj(x))  # nothing has turned it


class Bounded(NormalLinear):
    """Keeps its result for its gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).tanh()


def check_other_projections() -> None:
    """A module in the projection's place may read in its backward what it has returned."""
    torch.manual_seed(0)
    layer, x = Attention(64, 4), torch.randn(2, 19, 64, requires_grad=True)
    layer.qkv_proj = Bounded(64, 3 * 64, bias=False)
    torch.nn.init.normal_(layer.qkv_proj.weight)

    assert max(map(error, run(layer, x, True), run(layer, x, False))) < 1e-5


def check_checkpointing() -> None:
    """Selective checkpointing hands out the projection's result again: nothing has turned it."""
    torch.manual_seed(0)
    layer, x = Attention(64, 4), torch.randn(2, 19, 64, requires_grad=True)
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.linear.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)

    def run(**options: Any) -> list[Any]:
        y = layer(x)[0] if not options else checkpoint(lambda z: layer(z)[0], x, **options)
        return [y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

    want = run()
    for options in ({}, {"context_fn": contexts}):
        assert all(map(torch.equal, run(use_reentrant=False, **options), want)), options


def check_gradients_of_queries() -> None:
    """The kernel that makes dq of sums turns it back, and stores it beside other heads."""
    from slipstream.kernels.attention.triton.sums import softmax_dq_of_sums_kernel

    torch.manual_seed(0)
    B, T, H, D, BM, pitch = 2, 70, 3, 32, 64, 5
    tiles = -(-T // BM)
    sums = torch.randn(B * H * tiles * BM, D)
    added = torch.ones(B * H * tiles, dtype=torch.int32)
    added[1] = 0
    for rows in (1, B):
        angle = torch.randn(rows, T, D // 2)
        out = torch.zeros(B, T, pitch, D)
        softmax_dq_of_sums_kernel[(B * H * tiles,)](
            sums, added, out, None, 0.5, T, H, B, tiles, 0, D, BM, False,
            angle.cos(), angle.sin(), T if rows > 1 else 0, pitch,
        )  # fmt: skip
        dq = torch.where(added[:, None, None] > 0, sums.view(-1, BM, D), 0.0)
        dq = 0.5 * dq.view(B, H, -1, D)[:, :, :T].transpose(1, 2)
        cos, sin = (x[:, :, None] for x in (angle.cos(), angle.sin()))
        assert error(out[:, :, :H], rotary_reference(dq, cos, -sin, False)) < 1e-6
        assert not out[:, :, H:].any()


@interpreted
def test_rotary_attention() -> None:
    check_operator()
    check_layer()
    check_other_projections()
    check_checkpointing()
    check_gradients_of_queries()
