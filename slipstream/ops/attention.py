"""attention: softmax attention in the layout [B, T, H, D]."""

import torch
from torch import Tensor

from slipstream.core import checks
from slipstream.core.varlen import check_cu_seqlens_values
from slipstream.kernels.softmax.eager import attend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_size: int | tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Softmax attention.

        o_t = sum_s softmax_s(scale q_t . k_s) v_s        over the keys s that t sees

    The last query stands on the last key: with T queries and S keys, query t is at position
    S - T + t, and causal means that it sees keys up to there.

    Args:
        q: [B, T, H, D], any floating dtype.
        k: [B, S, HKV, D] in q's dtype, H a multiple of HKV: head h reads key head h // (H / HKV).
        v: [B, S, HKV, DV] in q's dtype.
        scale: None is D^-0.5.
        causal: no query sees a later key.
        window_size: W: sees the last W keys, its own position included, and without causal as many
            ahead; or (left, right): so many before and after its own, -1 for no bound.
        cu_seqlens: int32 or int64 [N+1], offsets of N sequences packed in B = 1. k and v are packed
            alike (S = T), or are [N, S, HKV, ...] beside key_lengths.
        key_lengths: int32 or int64 [B], or [N] if packed: how many of the S keys are real, the
            first ones; the last query stands on the last of them. None is S.

    Returns:
        o [B, T, H, DV] in q's dtype; 0 for a query that sees nothing.

    Raises:
        ValueError: shapes do not fit, an empty window, or cu_seqlens are no offsets.
        TypeError: dtypes.

    Cost: 2 B H T S (D + DV) flops, about half of it causal; memory linear in T, but for a mask
        [T, S] with a window, T != S > 1, or packed sequences not on the CPU.
    Source: Vaswani et al., Attention Is All You Need, 2017, eq. 1.
    """
    _check(q, k, v, cu_seqlens, key_lengths)
    window = _window(window_size, causal)
    device = q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    else:
        checks.expect_one_dtype({"q": q, "k": k, "v": v})
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    return attend(q, k, v, factor, window, cu_seqlens, key_lengths)


def _window(window_size: int | tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """(left, right), -1 for no bound"""
    if window_size is None:
        left = right = -1
    elif isinstance(window_size, int):
        if window_size < 1:
            raise ValueError(f"window_size: want at least 1 key, got {window_size}")
        left = right = window_size - 1
    else:
        left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    return left, right


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, key_lengths: Tensor | None
) -> None:
    checks.expect_rank("q", q, 4, "[B, T, H, D]")
    checks.expect_rank("k", k, 4, "[B, S, HKV, D]")
    checks.expect_rank("v", v, 4, "[B, S, HKV, DV]")
    batch, tokens, heads, width = q.shape
    keys, key_heads = k.shape[1:3]
    sequences = batch
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, batch)
        if not torch.compiler.is_compiling():
            check_cu_seqlens_values(cu_seqlens, tokens)
        if key_lengths is None:
            keys = tokens
        else:
            sequences = cu_seqlens.shape[0] - 1
    checks.expect_shape("k", k, (sequences, keys, key_heads, width))
    checks.expect_shape("v", v, (sequences, keys, key_heads, v.shape[3]))
    checks.expect_multiple("heads of q", heads, "heads of k", key_heads)
    checks.expect_floating({"q": q, "k": k, "v": v})
    checks.expect_one_device({"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens})
    if key_lengths is not None:
        checks.expect_shape("key_lengths", key_lengths, (sequences,))
        if key_lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"key_lengths: want int32 or int64, got {key_lengths.dtype}")
