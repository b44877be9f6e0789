"""slipstream.compat.flash_attn and flash_attn_interface beside formulas and separate calls."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream import ops
from slipstream.compat import flash_attn, flash_attn_interface, install
from slipstream.compat.flash_attn import bert_padding
from slipstream.compat.flash_attn.layers import rotary
from slipstream.compat.flash_attn.losses.cross_entropy import CrossEntropyLoss
from slipstream.compat.flash_attn.ops.triton import layer_norm
from slipstream.compat.flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from slipstream.compat.flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from slipstream.compat.flash_attn.ops.triton.rotary import apply_rotary

OFFSETS = torch.tensor([0, 5, 5, 14], dtype=torch.int32)


def test_installs() -> None:
    with install("flash_attn", "flash_attn_interface"):
        from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]
        from flash_attn.bert_padding import pad_input  # pyright: ignore[reportMissingImports]
        from flash_attn_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        assert flash_attn_func is ops.flash_attn_func
        assert pad_input is bert_padding.pad_input
        assert flash_attn_varlen_func is flash_attn_interface.flash_attn_varlen_func
        with pytest.raises(ImportError, match="Slipstream has no flash_attn_interface"):
            from flash_attn_interface import get_scheduler_metadata  # noqa: F401


@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_tensors_of_packed_sequences(with_sinks: bool) -> None:
    qkv, q, kv = torch.randn(14, 3, 4, 8), torch.randn(14, 4, 8), torch.randn(14, 2, 2, 8)
    options: dict[str, Any] = {"causal": True, "sinks": torch.randn(4) if with_sinks else None}
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, OFFSETS, 9, **options)
    both = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, OFFSETS, OFFSETS, 9, 9, **options)
    for begin, end in pairwise(OFFSETS.tolist()):
        alone = flash_attn.flash_attn_qkvpacked_func(qkv[None, begin:end], **options)
        torch.testing.assert_close(got[begin:end], alone[0])
        alone = flash_attn.flash_attn_kvpacked_func(
            q[None, begin:end], kv[None, begin:end], **options
        )
        torch.testing.assert_close(both[begin:end], alone[0])


def test_packed_tensors_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"qkv: want \[B, T, 3, H, D\]"):
        flash_attn.flash_attn_qkvpacked_func(torch.randn(1, 4, 2, 2, 8))
    with pytest.raises(ValueError, match=r"kv: want 4 dimensions \[S, 2, HKV, D\]"):
        flash_attn.flash_attn_varlen_kvpacked_func(
            torch.randn(4, 2, 8), torch.randn(1, 4, 2, 2, 8), OFFSETS, OFFSETS
        )


# FlashAttention-3


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_used_tokens(window: tuple[int, int]) -> None:
    """The first tokens of each sequence are used: the last of them is aligned with the last key."""
    q, k, v = (torch.randn(14, 2, 8, requires_grad=True) for _ in range(3))
    used_q = torch.tensor([3, 0, 9], dtype=torch.int32)
    used_k = torch.tensor([4, 0, 7], dtype=torch.int32)
    options: dict[str, Any] = {"causal": True, "window_size": window, "return_attn_probs": True}
    o, lse = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, OFFSETS, OFFSETS, 9, 9, used_q, used_k, **options
    )
    want, want_lse = torch.zeros_like(o), torch.full_like(lse, -torch.inf)
    for n, begin in enumerate(OFFSETS[:-1].tolist()):
        here, keys = slice(begin, begin + int(used_q[n])), slice(begin, begin + int(used_k[n]))
        if here.stop > here.start:
            alone = flash_attn_interface.flash_attn_func(
                q[None, here], k[None, keys], v[None, keys], **options
            )
            want[here], want_lse[:, here] = alone[0][0], alone[1][0]
    torch.testing.assert_close((o, lse), (want, want_lse))
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, want)]
    torch.testing.assert_close(*grads)


def test_fa3_refuses_by_name() -> None:
    q = torch.randn(1, 4, 2, 8)
    for name in ("qv", "q_descale", "k_descale", "v_descale"):
        for call in (
            lambda **x: flash_attn_interface.flash_attn_func(q, q, q, **x),
            lambda **x: flash_attn_interface.flash_attn_with_kvcache(q, q, q, **x),
            lambda **x: flash_attn_interface.flash_attn_varlen_func(
                *[q[0]] * 3, OFFSETS, OFFSETS, **x
            ),
        ):
            with pytest.raises(NotImplementedError, match=f"^{name}: not implemented"):
                call(**{name: torch.ones(1)})
    with pytest.raises(NotImplementedError, match="attention_chunk: not implemented, got 4"):
        flash_attn_interface.flash_attn_func(q, q, q, attention_chunk=4)
    for name in ("cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens"):
        with pytest.raises(NotImplementedError, match=f"^{name}: not implemented"):
            flash_attn_interface.flash_attn_with_kvcache(q, q, q, **{name: OFFSETS})


def test_combine() -> None:
    """Attention over parts of the keys, one of which a batch does not have."""
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 9, 4, 8), torch.randn(2, 9, 4, 8)
    parts = [ops.attention(q, k[:, x], v[:, x], causal=False, return_lse=True)
             for x in (slice(0, 4), slice(4, 9))]  # fmt: skip
    o, lse = (torch.stack(x) for x in zip(*parts))
    none = torch.full_like(lse[:1], -torch.inf)
    o, lse = torch.cat([o, o[:1]]), torch.cat([lse, none]).mT
    got = flash_attn_interface.flash_attn_combine(o, lse)
    want, want_lse = ops.attention(q, k, v, causal=False, return_lse=True)
    torch.testing.assert_close(got, (want, want_lse.mT))
    nothing = flash_attn_interface.flash_attn_combine(o, none.mT.expand_as(lse))
    assert nothing[0].abs().max() == 0
    place = torch.empty_like(want, dtype=torch.bfloat16)
    assert flash_attn_interface.flash_attn_combine(o, lse, place)[0] is place


def test_packed_heads() -> None:
    qkv = torch.randn(2, 6, 4 + 2 + 2, 8)
    got = flash_attn_interface.flash_attn_qkvpacked_func(qkv, num_heads_q=4, causal=True)
    q, k, v = qkv.split([4, 2, 2], 2)
    torch.testing.assert_close(got, ops.flash_attn_func(q, k, v, causal=True))
    with pytest.raises(ValueError, match="num_heads_q: want it"):
        flash_attn_interface.flash_attn_qkvpacked_func(qkv)


# padding


def test_padding_there_and_back() -> None:
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    tokens, indices, offsets, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert offsets.tolist() == [0, 4, 9, 9] and offsets.dtype == torch.int32
    assert (longest, used.tolist()) == (5, [3, 4, 0])
    back = bert_padding.pad_input(tokens, indices, 3, 5)
    selected = (mask + unused).bool()
    assert torch.equal(back, x * selected[..., None, None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, selected[..., None, None].expand_as(x).double())
    residual = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(residual[0], tokens) and torch.equal(residual[1], x.flatten(0, 1))


def test_padding_of_rows_that_hold_several_sequences() -> None:
    x = torch.randn(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, offsets, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, lengths
    )
    assert offsets.tolist() == [0, 2, 5, 8, 10, 16] and longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]


# rotary


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return ops.rotary_embedding(x, cos, sin, interleaved=interleaved, impl="reference")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_rotary_of_packed_heads(interleaved: bool, grouped: bool) -> None:
    """In place, and with gradients."""
    cos, sin = ops.rotary_tables(torch.arange(9), 6)
    qkv = torch.randn(2, 5, 8, 8) if grouped else torch.randn(2, 5, 3, 4, 8)
    q, k, v = qkv.split([4, 2, 2], 2) if grouped else qkv.unbind(2)
    shifted = cos[3:8], sin[3:8]
    turns = [turned(x, *shifted, interleaved) for x in (q, k)]
    want = torch.cat([*turns, v], 2) if grouped else torch.stack([*turns, v], 2)
    options: dict[str, Any] = {"interleaved": interleaved, "seqlen_offsets": 3}
    options |= {"num_heads_q": 4} if grouped else {}
    given = qkv.clone()
    got = rotary.apply_rotary_emb_qkv_(given, cos, sin, **options)
    assert got is given
    torch.testing.assert_close(got, want)
    leaf = qkv.clone().requires_grad_()
    got = rotary.apply_rotary_emb_qkv_(leaf, cos, sin, **options)
    torch.testing.assert_close((got, leaf), (want, want), check_layout=False)
    weight = torch.randn_like(got)
    (grad,) = torch.autograd.grad((got * weight).sum(), leaf)
    back = rotary.apply_rotary_emb_qkv_(weight.clone(), cos, -sin, **options)
    torch.testing.assert_close(grad, back)


def test_rotary_of_keys_and_of_packed_sequences() -> None:
    cos, sin = ops.rotary_tables(torch.arange(9), 8)
    kv, x = torch.randn(2, 5, 2, 2, 8), torch.randn(14, 2, 8)
    want = torch.stack([turned(kv[:, :, 0], cos, sin, False), kv[:, :, 1]], 2)
    torch.testing.assert_close(rotary.apply_rotary_emb_kv_(kv.clone(), cos, sin), want)
    got = rotary.apply_rotary_emb(x, cos, sin, cu_seqlens=OFFSETS, max_seqlen=9)
    for begin, end in pairwise(OFFSETS.tolist()):
        if end > begin:
            alone = rotary.apply_rotary_emb_torch(x[None, begin:end], cos, sin)[0]
            torch.testing.assert_close(got[begin:end], alone)
    back = apply_rotary(got, cos, sin, cu_seqlens=OFFSETS, conjugate=True)
    torch.testing.assert_close(back, x)
    moved = rotary.apply_rotary_emb(kv[:, :, 0], cos, sin, seqlen_offsets=torch.tensor([1, 4]))
    for b, start in enumerate((1, 4)):
        alone = turned(kv[b : b + 1, :, 0], cos[start:], sin[start:], False)
        torch.testing.assert_close(moved[b : b + 1], alone)


@pytest.mark.parametrize("scale_base", [None, 16.0])
def test_rotary_module(scale_base: float | None) -> None:
    """q and kv apart are what qkv gives, and scores depend on distances alone."""
    module = rotary.RotaryEmbedding(8, scale_base=scale_base)
    qkv = torch.randn(2, 12, 3, 2, 8)
    got = module(qkv.clone())
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone())
    torch.testing.assert_close(got, torch.cat([q[:, :, None], kv], 2))
    same = module(qkv[:, :1].expand(-1, 12, -1, -1, -1).clone(), seqlen_offset=2, max_seqlen=20)
    scores = torch.einsum("bthd,bshd->bhts", same[:, :, 0], same[:, :, 1])
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-4, atol=1e-4)


# norms and losses


@pytest.mark.parametrize("is_rms_norm", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_with_what_is_before_it(is_rms_norm: bool, parallel: bool, dtype: torch.dtype) -> None:
    x, x1 = (torch.randn(3, 4, 16).to(dtype) for _ in range(2))
    residual, rowscale = torch.randn(3, 4, 16), torch.rand(3, 4)
    weight, bias, weight1 = torch.randn(16), torch.randn(16), torch.randn(16)
    given: dict[str, Any] = {"residual": residual, "prenorm": True, "eps": 1e-5}
    given |= {"x1": x1, "weight1": weight1} if parallel else {"rowscale": rowscale}
    fn = rms_norm_fn if is_rms_norm else layer_norm_fn
    got = fn(x, weight, bias, zero_centered_weight=True, **given)
    h = residual + (x.float() + x1.float() if parallel else x * rowscale[..., None])

    def norm(weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_rms_norm:
            y = F.rms_norm(h, (16,), weight + 1, 1e-5)
            return (y if bias is None else y + bias).to(dtype)
        return F.layer_norm(h, (16,), weight + 1, bias, 1e-5).to(dtype)

    want = [norm(weight, bias), *([norm(weight1, None)] if parallel else []), h]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got, tuple(want), **tolerance)


def test_norm_dropout_masks() -> None:
    """They say what was dropped, and gradients agree."""
    x, x1 = (torch.randn(64, 32, requires_grad=True) for _ in range(2))
    weight = torch.ones(32)
    given: dict[str, Any] = {"dropout_p": 0.25, "prenorm": True, "return_dropout_mask": True}
    _, h, mask, mask1 = layer_norm_fn(x, weight, None, None, x1, **given)
    assert 0.65 < mask.float().mean() < 0.85 and not torch.equal(mask, mask1)
    want = (x * mask + x1 * mask1) / 0.75
    torch.testing.assert_close(h, want)
    grads = [torch.autograd.grad(y.square().sum(), (x, x1)) for y in (h, want)]
    torch.testing.assert_close(*grads)
    *_, none, none1 = rms_norm_fn(x, weight, None, return_dropout_mask=True)
    assert none is None and none1 is None


def test_norm_where_results_go() -> None:
    x, weight, residual = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)
    out, h = torch.empty(4, 8), torch.empty(4, 8)
    given: dict[str, Any] = {"residual": residual, "prenorm": True}
    got = rms_norm_fn(x, weight, None, out=out, residual_out=h, **given)
    assert got[0] is out and got[1] is h
    torch.testing.assert_close(got, rms_norm_fn(x, weight, None, **given))
    assert rms_norm_fn(x, weight, None, out_dtype=torch.bfloat16).dtype == torch.bfloat16
    linear, bias = torch.randn(5, 8), torch.randn(5)
    want = F.linear(rms_norm_fn(x, weight, None), linear, bias)
    got = layer_norm.layer_norm_linear_fn(x, weight, None, linear, bias, is_rms_norm=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    logits, labels = torch.randn(6, 11, requires_grad=True), torch.randint(0, 11, (6,))
    labels[2] = -100
    want = F.cross_entropy(logits * 0.7, labels, reduction=reduction, label_smoothing=0.1)
    rows = (0.01 * (logits * 0.7).logsumexp(-1) ** 2).masked_fill(labels == -100, 0)
    z_loss = {"mean": rows.sum() / 5, "sum": rows.sum(), "none": rows}[reduction]
    module = CrossEntropyLoss(
        reduction=reduction, label_smoothing=0.1, logit_scale=0.7, lse_square_scale=0.01,
        return_z_loss=True,
    )  # fmt: skip
    assert isinstance(module, nn.Module)
    loss, part = module(logits, labels, precomputed_lse=logits.logsumexp(-1))
    torch.testing.assert_close((loss, part), (want + z_loss, z_loss))
    grads = [torch.autograd.grad(x.sum(), logits, retain_graph=True) for x in (loss, want + z_loss)]
    torch.testing.assert_close(*grads)
    got = cross_entropy_loss(logits, labels, None, 0.1, 0.7, 0.01)
    torch.testing.assert_close(got[0].sum() if reduction == "sum" else got[0].sum() / 5, (
        loss if reduction != "none" else loss.sum() / 5
    ))  # fmt: skip
