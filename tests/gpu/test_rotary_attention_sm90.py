"""Attention that rotates queries and keys itself, on sm_90: gradients against float64 and against a
rotation before attention, the same bits twice and in place, packed, with windows and groups of
heads, within checkpointing, selective too, and no host sync."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.rotary import softmax_of_rotated
from slipstream.kernels.elementwise.rotary import rotary_reference
from slipstream.layers import Attention
from slipstream.ops import attention
from slipstream.ops.rotary import rotary_heads
from tests.support.operators import relative_error

SM_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not SM_90, reason="needs an sm_90 device")
BF16, FP16 = torch.bfloat16, torch.float16
# width of a head, rows, tokens, heads, packed, window, rows of tables
CALLS = [
    (128, 2, 1000, (4, 4, 4), False, None, 1),
    (64, 2, 333, (4, 2, 2), False, None, 2),
    (128, 1, 1500, (4, 2, 2), True, None, 1),
    (128, 1, 777, (8, 1, 1), True, 100, 1),
    (64, 1, 1500, (2, 2, 2), True, 64, 1),
    (128, 2, 65, (2, 1, 1), False, 9, 2),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of heads of which sm_90's backward stores gradients rotated back."""
    from slipstream.kernels.attention.sm90 import launch

    seen: list[int] = []
    run = launch.backward_of_rotated

    def counted(inputs: Any, *args: Any) -> Any:
        seen.append(inputs.q.shape[-1])
        return run(inputs, *args)

    monkeypatch.setattr(launch, "backward_of_rotated", counted)
    monkeypatch.setattr("slipstream.runtime.call_replay.ENABLED", False)
    return seen


def gradients(call: Callable[[Tensor], Tensor], qkv: Tensor, do: Tensor) -> list[Tensor]:
    leaf = qkv.clone().requires_grad_()
    o = call(leaf * 1)
    return [o.detach(), *torch.autograd.grad(o, leaf, do.to(o.dtype))]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_beside_float64(call: tuple, dtype: torch.dtype, calls: list[int]) -> None:
    D, B, T, sizes, packed, window, rows = call
    torch.manual_seed(0)
    cu = torch.tensor([0, 5, 5, 390, T], dtype=torch.int32, device="cuda") if packed else None
    options = AttentionOptions(D**-0.5, -1 if window is None else window - 1, 0, 0.0, 0.0)
    angle = torch.randn(rows, T, D // 2, device="cuda")
    tables = angle.cos(), angle.sin()
    qkv = torch.randn(B, T, sum(sizes), D, device="cuda").to(dtype)
    do = torch.randn(B, T, sizes[0], D, device="cuda").to(dtype)

    def inside(x: Tensor, in_place: bool = False) -> Tensor:
        return softmax_of_rotated(x, *tables, cu, sizes, options, "sm90", in_place)

    def before(x: Tensor) -> Tensor:
        return attention(*rotary_heads(x, tables, sizes), window_size=window, cu_seqlens=cu)

    def exact(x: Tensor) -> Tensor:
        q, k, v = x.split(sizes, 2)
        cos, sin = (t.double()[:, :, None] for t in tables)
        q, k = (rotary_reference(y, cos, sin, False) for y in (q, k))
        return softmax_reference(AttentionInputs(q, k, v, cu_q=cu, cu_k=cu), options)[0]

    got = gradients(inside, qkv, do)
    assert D in calls
    for again in (gradients(inside, qkv, do), gradients(partial(inside, in_place=True), qkv, do)):
        assert all(map(torch.equal, got, again))
    other, want = gradients(before, qkv, do), gradients(exact, qkv.double(), do.double())
    assert torch.equal(got[0], other[0])
    cut = [sizes[0], sizes[1], sizes[2]]
    for x, y, z in zip(*(t[1].split(cut, 2) for t in (got, other, want))):
        assert relative_error(x, z) <= 1.1 * relative_error(y, z) + 1e-4


@pytest.mark.parametrize("way", ["plain", "checkpoint", "selective"])
@pytest.mark.parametrize("hooked", [False, True])
def test_layer(way: str, hooked: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a rotation before attention. Selective checkpointing keeps the projection's result,
    which nothing may change."""
    torch.manual_seed(0)
    layer = Attention(256, 2, num_kv_heads=1).cuda().to(BF16)
    x = torch.randn(2, 300, 256, device="cuda").to(BF16)
    if hooked:
        layer.qkv_proj.register_forward_hook(lambda *args: None)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        if way == "plain":
            y = layer(leaf)[0]
        else:
            options: dict[str, Any] = {"use_reentrant": False}
            if way == "selective":
                kept = [torch.ops.aten.mm.default, torch.ops.aten.linear.default]
                options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
            y = checkpoint(lambda z: layer(z)[0], leaf, **options)
        grads = torch.autograd.grad(y, [leaf, *layer.parameters()], torch.ones_like(y))
        return [y.detach(), *grads]

    run()  # the first may compile and probe its kernels, by calls of their own
    calls.clear()
    got = run()
    assert calls == [128]
    monkeypatch.setattr(layer, "_only_rotates", lambda qkv: False)
    want = run()
    assert torch.equal(got[0], want[0])
    assert all(relative_error(x, y) < 5e-3 for x, y in zip(got, want, strict=True))


def test_no_host_sync() -> None:
    layer = Attention(256, 2).cuda().to(BF16)
    x = torch.randn(2, 300, 256, device="cuda").to(BF16).requires_grad_()
    for mode in (0, "error"):
        for _ in range(3):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                layer(x)[0].sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode(0)
