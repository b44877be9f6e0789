"""flash_attn_interface, the module of FlashAttention-3, on Slipstream's attention.

    from slipstream.compat.flash_attn_interface import flash_attn_varlen_func

Names, positional order, defaults and keywords are its own. num_splits, pack_gqa, sm_margin,
scheduler_metadata and deterministic have no effect; what changes a result and is not implemented is
refused by its name. The differences are in docs/guides/migrate_flash_attn.md.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.missing import missing_names
from slipstream.ops import flash_attn as ops
from slipstream.ops.attention import attention

__getattr__ = missing_names(__name__, ("get_scheduler_metadata",))

Result = Tensor | tuple[Tensor, Tensor]


def _refuse(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise NotImplementedError(f"{name}: not implemented, got {_shown(x)}")


def _shown(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


@checks.operator
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """slipstream.ops.flash_attn_func by the arguments of FlashAttention-3.

    Args:
        q: [B, T, H, D]. k: [B, S, HKV, D]. v: [B, S, HKV, DV].
        qv, q_descale, k_descale, v_descale: None. attention_chunk: 0.
        return_attn_probs: also return lse.

    Returns:
        o [B, T, H, DV]; or o, lse [B, H, T].

    Raises:
        NotImplementedError: one of those that have to be None or 0 is not.
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _refuse(attention_chunk=attention_chunk or None)
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softcap": softcap}
    o, lse = attention(q, k, v, scale=softmax_scale, return_lse=True, **options)
    return (o, lse) if return_attn_probs else o


@checks.operator
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func of qkv [B, T, 3, H, D], or [B, T, H + 2 HKV, D] with num_heads_q = H."""
    if qkv.dim() == 5:
        checks.expect_shape("qkv", qkv, (*qkv.shape[:2], 3, *qkv.shape[3:]))
        q, k, v = qkv.unbind(2)
    else:
        checks.expect_rank("qkv", qkv, 4, "[B, T, H + 2 HKV, D]")
        if num_heads_q is None:
            raise ValueError("num_heads_q: want it with qkv [B, T, H + 2 HKV, D], got None")
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads, heads], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@checks.operator
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """flash_attn_func on packed sequences.

    Args:
        q: [T, H, D]. k, v: [S, HKV, D] and [S, HKV, DV]. cu_seqlens_q, cu_seqlens_k: int32 [N + 1].
        max_seqlen_q, max_seqlen_k: not needed, and not read.
        seqused_q, seqused_k: int32 [N], how many tokens of each sequence are used, the first ones:
            o is 0 for further queries, and further keys are not seen.
        The rest: as flash_attn_func.

    Returns:
        o [T, H, DV]; or o, lse [H, T] (-inf for queries that are not used).

    Raises:
        ValueError: shapes do not fit. TypeError: dtypes. NotImplementedError: as flash_attn_func.
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _refuse(attention_chunk=attention_chunk or None)
    checks.expect_rank("q", q, 3, "[T, H, D]")
    checks.expect_rank("k", k, 3, "[S, HKV, D]")
    checks.expect_rank("v", v, 3, "[S, HKV, DV]")
    checks.expect_cu_seqlens(cu_seqlens_q, 1, q.shape[0], name="cu_seqlens_q")
    checks.expect_shape("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape)
    place = None
    if seqused_q is not None:
        checks.expect_shape("seqused_q", seqused_q, (cu_seqlens_q.shape[0] - 1,))
        place, cu_seqlens_q = _used_first(cu_seqlens_q, seqused_q, q.shape[0])
        # those that are not used are one more sequence, without keys
        q, cu_seqlens_k = q[place], torch.cat([cu_seqlens_k, cu_seqlens_k[-1:]])
        if seqused_k is not None:
            seqused_k = torch.cat([seqused_k, seqused_k.new_zeros(1)])
    if seqused_k is not None:
        checks.expect_shape("seqused_k", seqused_k, (cu_seqlens_k.shape[0] - 1,))
    o, lse = attention(
        q[None],
        k[None],
        v[None],
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        cu_seqlens=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        key_lengths=seqused_k,
        return_lse=True,
    )
    o, lse = o[0], lse[0]
    if place is not None:
        back = torch.empty_like(place).scatter_(
            0, place, torch.arange(len(place), device=place.device).to(place)
        )
        o, lse = o[back], lse[:, back]
    return (o, lse) if return_attn_probs else o


def _used_first(offsets: Tensor, used: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The tokens' places, the used ones of each sequence first, and the offsets of such a row."""
    token = torch.arange(tokens, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), token.to(offsets), right=True)
    sequence = sequence.clamp(max=max(used.shape[0] - 1, 0))
    is_used = token - offsets[sequence] < used[sequence]
    place = (~is_used).int().argsort(stable=True)
    ends = used.cumsum(0, dtype=offsets.dtype)
    whole = offsets.new_full((1,), tokens)
    return place, torch.cat([offsets.new_zeros(1), ends, whole])


@checks.operator
def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One attention of what it is over parts of the keys, in plain torch.

    Args:
        out_partial: [P, B, T, H, DV] of P parts. lse_partial: [P, B, T, H].
        out: where the result goes. out_dtype: its dtype, out_partial's if None.

    Returns:
        o [B, T, H, DV], and lse [B, T, H].
    """
    checks.expect_rank("out_partial", out_partial, 5, "[P, B, T, H, DV]")
    checks.expect_shape("lse_partial", lse_partial, out_partial.shape[:-1])
    if out is not None:
        checks.expect_shape("out", out, out_partial.shape[1:])
    lse = lse_partial.logsumexp(0)
    # where no part has a key, lse is -inf and there is nothing to add
    weight = (lse_partial - lse).exp().masked_fill(lse.isneginf(), 0.0)
    o = (weight[..., None] * out_partial).sum(0).to(out_dtype or out_partial.dtype)
    return o if out is None else out.copy_(o), lse


@checks.operator
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """slipstream.ops.flash_attn_with_kvcache, whose block_table is page_table here.

    Raises:
        NotImplementedError: qv, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, one of the
            descales or attention_chunk is given.
    """
    _refuse(
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk or None,
    )
    return ops.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        page_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
    )
