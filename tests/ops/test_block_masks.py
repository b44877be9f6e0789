"""Torch's BlockMask given to attention, beside torch's attention under the mask that it says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from slipstream import ops
from slipstream.ops import _block_masks

H, HKV, D = 4, 2, 8
DOCUMENT = torch.tensor([0, 0, 1, 1, 1, 2]).repeat_interleave(16)
# a function of mask, heads, T, S, and what it becomes: keys a block, and whether causal
MASKS: dict[str, tuple[Callable[..., Any], int, int, int, int, bool]] = {
    "causal": (lambda b, h, t, s: s <= t, 1, 96, 96, 128, True),
    "everything": (lambda b, h, t, s: s >= 0, 1, 40, 96, 128, False),
    "nothing": (lambda b, h, t, s: s < 0, 1, 40, 40, 128, True),
    "documents": (lambda b, h, t, s: (DOCUMENT[t] == DOCUMENT[s]) & (s <= t), 1, 96, 96, 16, True),
    "prefix": (lambda b, h, t, s: (s <= t) | (s < 20), 1, 96, 96, 1, False),
    "window": (lambda b, h, t, s: (s <= t) & (t - s < 9), 1, 96, 96, 1, True),
    "fours": (lambda b, h, t, s: (s // 4 + t) % 3 == 0, 1, 50, 70, 4, False),
    "heads": (lambda b, h, t, s: (s <= t) & (s // 64 != h), H, 160, 160, 64, True),
    "rows": (lambda b, h, t, s: s <= t + b, 1, 33, 47, 1, False),
}


def results(run: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    o = run(*leaves)
    loss = (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)).sum()
    return [o.detach(), *torch.autograd.grad(loss, leaves)]


def made(T: int, S: int) -> list[Tensor]:
    torch.manual_seed(T)
    return [torch.randn(2, *n, D, dtype=torch.float64) for n in ((T, H), (S, HKV), (S, HKV))]


def under(dense: Tensor) -> Callable[..., Tensor]:
    """Torch's attention under a mask [B, heads, T, S], 0 where nothing is seen."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense, enable_gqa=True)
        return o.masked_fill(~dense.any(-1, keepdim=True), 0.0).transpose(1, 2)

    return run


@pytest.mark.parametrize("name", MASKS)
def test_block_masks_equal_torchs_attention(name: str) -> None:
    mod, heads, T, S, block, causal = MASKS[name]
    sizes = 2 if name == "rows" else 1, heads, T, S
    mask = create_block_mask(mod, *sizes, device="cpu", BLOCK_SIZE=32)
    got = results(lambda *x: ops.attention(*x, block_mask=mask), made(T, S))
    want = results(under(create_mask(mod, *sizes, device="cpu")), made(T, S))
    torch.testing.assert_close(got, [y.nan_to_num(0.0) for y in want], rtol=1e-10, atol=1e-10)
    assert getattr(mask, "_slipstream_lists")[1:] == (block, causal)  # noqa: B009


def test_block_masks_are_read_anew_when_parts_change() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 40, 40, device="cpu", BLOCK_SIZE=32)
    x = [t.detach() for t in made(40, 40)]
    ops.attention(*x, block_mask=mask)
    mask.mask_mod = lambda b, h, q, k: (q >= k) & (q - k < 3)
    got, want = ops.attention(*x, block_mask=mask), ops.attention(*x, causal=True, window_size=3)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_block_masks_without_a_function_see_whole_blocks() -> None:
    counts = torch.tensor([[[2, 4, 2]]]).int()  # with blocks that are none, and one twice
    indices = torch.tensor([[[[1, 7, 0, 0], [0, 1, -1, 1], [9, -3, 0, 0]]]]).int()
    mask = BlockMask.from_kv_blocks(0 * counts, indices, BLOCK_SIZE=16, seq_lengths=(40, 32))
    mask.kv_num_blocks = counts
    dense = torch.zeros(1, 1, 40, 32, dtype=torch.bool)
    dense[..., :16, 16:] = dense[..., 16:32, :] = True
    run = torch.compile(lambda q, k, v: ops.attention(q, k, v, block_mask=mask), backend="eager")
    got = results(run, made(40, 32))
    want = [y.nan_to_num(0.0) for y in results(under(dense), made(40, 32))]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_block_masks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = create_block_mask(MASKS["causal"][0], 1, 1, 40, 40, device="cpu")
    with torch.inference_mode():
        o = ops.attention(*made(40, 40), block_mask=mask)
    monkeypatch.setattr(_block_masks, "_lowered", None)
    assert torch.equal(results(lambda *x: ops.attention(*x, block_mask=mask), made(40, 40))[0], o)


def test_block_masks_are_refused_by_name() -> None:
    q, k, v = made(40, 40)
    mask = create_block_mask(MASKS["causal"][0], 1, 1, 40, 40, device="cpu")
    call: Any = ops.attention
    for name, value in {"selected": q, "window_size": 3, "tail": True, "block": 4}.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: is not implemented with block_m"):
            call(q, k, v, block_mask=mask, **{name: value})
    few = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, seq_lengths=(200, 40))
    for given, count in ((mask, 39), (few, 200)):
        with pytest.raises(ValueError, match=r"^block_mask: want sizes .*, (40|128), 40\)$"):
            call(torch.randn(2, count, H, D), k, v, block_mask=given)
    with pytest.raises(TypeError, match=r"^block_mask: want torch's BlockMask, got Tensor"):
        call(q, k, v, block_mask=q)
