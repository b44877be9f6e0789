"""flash_attn.layers.rotary: rotary position embeddings of q, k, and of packed qkv and kv."""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compat.fla.modules import rotary as fla

Offsets = int | Tensor


@checks.operator
def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
) -> Tensor:
    """Turns x [B, T, H, D] by the angles of tables cos, sin [S, R/2].

    Args:
        inplace: x is overwritten.
        seqlen_offsets: the position of the first token, of all sequences or of each [B].
        cu_seqlens: offsets [B + 1]; x is packed, [T, H, D]. max_seqlen: no effect.
    """
    layout = "[B, T, H, D]" if cu_seqlens is None else "[T, H, D]"
    checks.expect_rank("x", x, 4 if cu_seqlens is None else 3, layout)
    if isinstance(seqlen_offsets, Tensor):
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        checks.expect_shape("seqlen_offsets", seqlen_offsets, (sequences,))
    rows = x if cu_seqlens is None else x[None]
    y = fla.rotary_embedding(rows, cos, sin, interleaved, False, seqlen_offsets, cu_seqlens)
    y = y.view(x.shape)
    return _overwritten(x, y) if inplace else y


apply_rotary_emb_func = apply_rotary_emb


@checks.operator
def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """apply_rotary_emb from position 0 on, in plain torch."""
    from slipstream.ops import rotary_embedding

    return rotary_embedding(x, cos, sin, interleaved=interleaved, impl="reference")


@checks.operator
def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turns the queries and keys of qkv in place.

    Args:
        qkv: [B, T, 3, H, D], or [B, T, H + 2 HKV, D] with num_heads_q = H.
        cos_k, sin_k: tables of the keys; None is cos and sin.
    """
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    heads = qkv.flatten(2, 3) if qkv.dim() == 5 else qkv
    if qkv.dim() == 5:
        num_heads_q = qkv.shape[3]
    elif num_heads_q is None:
        raise ValueError("num_heads_q: want it with qkv [B, T, H + 2 HKV, D], got None")
    num_heads_k = (heads.shape[2] - num_heads_q) // 2
    q, k, v = heads.split([num_heads_q, num_heads_k, num_heads_k], 2)
    q = apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    k = apply_rotary_emb(k, cos_k, sin_k, interleaved, seqlen_offsets=seqlen_offsets)
    return _overwritten(qkv, torch.cat([q, k, v], 2).view(qkv.shape))


@checks.operator
def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> Tensor:
    """Turns the keys of kv [B, S, 2, HKV, D] in place."""
    k, v = kv.unbind(2)
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    return _overwritten(kv, torch.stack([k, v], 2))


def _overwritten(x: Tensor, y: Tensor) -> Tensor:
    """x holds y; what is returned has y's gradient."""
    with torch.no_grad():
        x.copy_(y)
    return y if y.requires_grad else x


class RotaryEmbedding(fla.RotaryEmbedding):
    """Rotary embedding of packed qkv, or of q and kv, with tables that grow.

    Args:
        dim: how many features turn. base: of the frequencies.
        interleaved: pairs are (2i, 2i + 1), not (i, i + dim/2).
        scale_base: tokens of xPos's decay; None is without.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(dim, base, scale_base, interleaved, True, device)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """qkv as apply_rotary_emb_qkv_ has it, or q [B, T, H, D] beside kv [B, S, 2, HKV, D].

        Args:
            seqlen_offset: the position of the first token, of all sequences or of each [B]; a
                tensor wants max_seqlen, at least at the first call.
        """
        (cos, sin), of_k = self._tables(qkv, seqlen_offset, max_seqlen)
        options = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, *of_k, *options, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, *of_k, *options)
