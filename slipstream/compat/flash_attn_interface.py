"""flash_attn_interface, the module of FlashAttention-3, on Slipstream's attention.

    from slipstream.compat.flash_attn_interface import flash_attn_varlen_func

Names, positional order, defaults and keywords are its own. num_splits, pack_gqa, sm_margin,
scheduler_metadata and deterministic have no effect; what changes a result and is not implemented is
refused by its name. The differences are in docs/guides/migrate_flash_attn.md.
"""

from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fixed import fixed, missing_names, refuse
from slipstream.ops import flash_attn as ops
from slipstream.ops.attention import attention

__getattr__ = missing_names(__name__, ("get_scheduler_metadata",))

Result = Tensor | tuple[Tensor, Tensor]
# what is refused, if it asks for something, and what nothing follows from
_DESCALES = "q_descale k_descale v_descale"
_NO_SCALES = dict.fromkeys(("qv", *_DESCALES.split()), (Tensor | None, None))
_REFUSED: dict[str, tuple[Any, Any]] = _NO_SCALES | {"attention_chunk": (int, 0)}
_UNREAD = {"num_splits": (int, 1), "pack_gqa": (bool | None, None), "sm_margin": (int, 0)}
_UNREAD |= {"deterministic": (bool, False), "scheduler_metadata": (Tensor | None, None)}


def _without_none(found: Any) -> Any:
    return found[:2] if isinstance(found, tuple) else found


flash_attn_func = checks.operator(
    fixed(
        ops.flash_attn_func,
        "flash_attn_func",
        """slipstream.ops.flash_attn_func by the arguments of FlashAttention-3.

    Args:
        q: [B, T, H, D]. k: [B, S, HKV, D]. v: [B, S, HKV, DV].
        qv, q_descale, k_descale, v_descale: None. attention_chunk: 0.
        return_attn_probs: also return lse.

    Returns:
        o [B, T, H, DV]; or o, lse [B, H, T].

    Raises:
        NotImplementedError: one of those that have to be None or 0 is not.
    """,
        order=f"q k v softmax_scale causal qv {_DESCALES} window_size attention_chunk softcap "
        "num_splits pack_gqa deterministic sm_margin return_attn_probs",
        added=_REFUSED | _UNREAD,
        refused=_REFUSED,
        result=_without_none,
    )
)


def _apart(found: dict[str, Any]) -> dict[str, Any]:
    """q, k and v of qkv."""
    qkv, heads = found.pop("qkv"), found.pop("num_heads_q", None)
    if qkv.dim() == 5:
        checks.expect_shape("qkv", qkv, (*qkv.shape[:2], 3, *qkv.shape[3:]))
        q, k, v = qkv.unbind(2)
    else:
        checks.expect_rank("qkv", qkv, 4, "[B, T, H + 2 HKV, D]")
        if heads is None:
            raise ValueError("num_heads_q: want it with qkv [B, T, H + 2 HKV, D], got None")
        others = (qkv.shape[2] - heads) // 2
        q, k, v = qkv.split([heads, others, others], 2)
    return {"q": q, "k": k, "v": v, **found}


flash_attn_qkvpacked_func = checks.operator(
    fixed(
        flash_attn_func,
        "flash_attn_qkvpacked_func",
        "flash_attn_func of qkv [B, T, 3, H, D], or [B, T, H + 2 HKV, D] with num_heads_q = H.",
        order=f"qkv softmax_scale causal {_DESCALES} window_size attention_chunk softcap "
        "deterministic num_heads_q sm_margin return_attn_probs",
        added={"qkv": (Tensor, Parameter.empty), "num_heads_q": (int | None, None)},
        change=_apart,
    )
)


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
    for name, x in zip(_REFUSED, (qv, q_descale, k_descale, v_descale, attention_chunk)):
        refuse(name, x, _REFUSED[name][1])
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


_REFUSED_OF_CACHES = _REFUSED | dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens"), (Tensor | None, None)
)
flash_attn_with_kvcache = checks.operator(
    fixed(
        ops.flash_attn_with_kvcache,
        "flash_attn_with_kvcache",
        """slipstream.ops.flash_attn_with_kvcache, whose block_table is page_table here.

    Raises:
        NotImplementedError: qv, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, one of the
            descales or attention_chunk is given.
    """,
        order="q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens "
        f"{_DESCALES} softmax_scale causal window_size attention_chunk softcap "
        "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse",
        renamed={"page_table": "block_table"},
        added=_UNREAD
        | _REFUSED_OF_CACHES
        | {"num_splits": (int, 0), "max_seqlen_q": (int | Tensor | None, None)},
        refused=_REFUSED_OF_CACHES,
    )
)
