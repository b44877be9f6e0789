"""Softmax attention: packed equals separate, caches, windows, and what it refuses."""

import pytest
import torch

from slipstream.ops.attention import attention


def qkv(B: int = 1, T: int = 20, S: int | None = None) -> tuple[torch.Tensor, ...]:
    S = T if S is None else S
    return torch.randn(B, T, 4, 8), torch.randn(B, S, 2, 8), torch.randn(B, S, 2, 8)


def test_attention_window_of_one_is_the_value_itself() -> None:
    q, k, v = qkv()
    for given in ({}, {"cu_seqlens": torch.tensor([0, 12, 20])}):
        got = attention(q, k, v, window_size=1, **given)
        torch.testing.assert_close(got, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(attention(q, k, v, window_size=(-1, -1)), attention(q, k, v))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_window_of_zero_sees_nothing(packed: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 5, 5))
    offsets = torch.tensor([0, 2, 5]) if packed else None
    sinks = torch.randn(4, requires_grad=True)
    o, lse = attention(q, k, v, window_size=0, cu_seqlens=offsets, return_lse=True)
    assert torch.equal(o, torch.zeros(1, 5, 4, 8))
    assert torch.equal(lse, torch.full((1, 4, 5), -torch.inf))
    given = {"cu_seqlens": offsets, "sinks": sinks, "return_lse": True}
    o, lse = attention(q, k, v, window_size=0, **given)
    assert torch.equal(lse, sinks[:, None].expand(1, 4, 5))
    *rest, dsinks = torch.autograd.grad(o.sum() + lse.sum(), [q, k, v, sinks])
    assert not any(x.any() for x in rest)
    assert torch.equal(dsinks, torch.full((4,), 5.0))
