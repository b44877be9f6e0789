"""flash_attn.flash_attn_interface: attention of tensors apart, and of packed ones."""

from torch import Tensor

from slipstream.common import checks
from slipstream.ops.flash_attn import (
    Result,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@checks.operator
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Result:
    """flash_attn_func of qkv [B, T, 3, H, D]."""
    q, k, v = _parts("qkv", qkv, 3, "[B, T, 3, H, D]", 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sinks=sinks,
    )  # fmt: skip


@checks.operator
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Result:
    """flash_attn_func of q [B, T, H, D] and kv [B, S, 2, HKV, D]."""
    k, v = _parts("kv", kv, 2, "[B, S, 2, HKV, D]", 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, sinks=sinks,
    )  # fmt: skip


@checks.operator
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Result:
    """flash_attn_varlen_func of qkv [T, 3, H, D]."""
    q, k, v = _parts("qkv", qkv, 3, "[T, 3, H, D]", 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, sinks=sinks,
    )  # fmt: skip


@checks.operator
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
) -> Result:
    """flash_attn_varlen_func of q [T, H, D] and kv [S, 2, HKV, D]."""
    k, v = _parts("kv", kv, 2, "[S, 2, HKV, D]", 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks=sinks,
    )  # fmt: skip


def _parts(name: str, x: Tensor, count: int, layout: str, rank: int) -> tuple[Tensor, ...]:
    checks.expect_rank(name, x, rank, layout)
    if x.shape[-3] != count:
        raise ValueError(f"{name}: want {layout}, got shape {tuple(x.shape)}")
    return x.unbind(-3)
