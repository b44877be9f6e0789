"""fla.modules.rotary: rotary position embeddings from tables."""

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.ops import rotary as ops


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """Turns x [B, T, H, D] by the angles of tables [S, R/2].

    Args:
        inplace: x is overwritten and returned.
        seqlen_offsets: the position of the first token, of all sequences or of each [N]. Tokens at
            positions below 0 are padding and turn as the one at 0.
        cu_seqlens: offsets [N+1] of packed sequences. chunk_indices: no effect.
    """
    T, offsets = x.shape[1], seqlen_offsets
    if cu_seqlens is not None:
        if not isinstance(offsets, Tensor):
            offsets = torch.full_like(cu_seqlens[:-1], offsets)
        positions = ops.packed_positions(cu_seqlens, T, offsets=offsets.to(cu_seqlens))
    else:
        positions = torch.arange(T, device=x.device)
        positions = positions + (offsets[:, None] if isinstance(offsets, Tensor) else offsets)
    if isinstance(offsets, Tensor):
        positions = positions.clamp(min=0)
    y = ops.rotary_embedding(x, cos, sin, positions=positions, interleaved=interleaved)
    return x.copy_(y) if inplace else y


class RotaryEmbedding(nn.Module):
    """rotary_embedding of queries and keys, with tables that grow.

    Args:
        dim: how many features turn. base: of the frequencies.
        scale_base: tokens of xPos's decay; None is without.
        interleaved: pairs are (2i, 2i + 1), not (i, i + dim/2).
        pos_idx_in_fp32: positions are float32, not inv_freq's dtype.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim: want an even number of features, got {dim}")
        self.dim, self.base, self.scale_base = dim, float(base), scale_base
        self.interleaved, self.pos_idx_in_fp32 = interleaved, pos_idx_in_fp32
        made = {"dtype": torch.float32, "device": device}
        self.register_buffer("inv_freq", torch.empty(dim // 2, **made), persistent=False)
        scale = None if scale_base is None else torch.empty(dim // 2, **made)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inv_freq.copy_(self._compute_inv_freq(self.inv_freq.device))
            if self.scale is not None:
                self.scale.copy_(self._compute_scale(self.scale.device))

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(self._pairs(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        return (self._pairs(device) / self.dim + 0.4) / 1.4

    def _pairs(self, device: Any) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Tables of at least seqlen rows on a device, in a dtype."""
        table = self._cos_cached
        if (
            table is not None
            and seqlen <= self._seq_len_cached
            and table.device == device
            and table.dtype == dtype
            # a tensor of inference mode is no part of a graph with gradients; traces cannot ask
            and (torch.compiler.is_compiling() or not (self.training and table.is_inference()))
        ):
            return
        self._seq_len_cached = seqlen
        frequencies = self.inv_freq
        if self.pos_idx_in_fp32 and frequencies.dtype != torch.float32:
            frequencies = self._compute_inv_freq(device)  # the model was cast
        positions = torch.arange(seqlen, device=device, dtype=frequencies.dtype)
        angle = torch.outer(positions, frequencies)
        cos, sin = angle.cos(), angle.sin()
        if self.scale is not None:
            assert self.scale_base is not None
            power = (torch.arange(seqlen, device=device) - seqlen // 2) / self.scale_base
            scale = self.scale.to(device) ** power[:, None]
            self._cos_k_cached, self._sin_k_cached = (
                (cos / scale).to(dtype),
                (sin / scale).to(dtype),
            )
            cos, sin = cos * scale, sin * scale
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """q and k [B, T, H, D], turned.

        Args:
            seqlen_offset: as seqlen_offsets of rotary_embedding; a tensor wants max_seqlen, at
                least at the first call.
            max_seqlen: rows of the tables; T + seqlen_offset if None.
        """
        of_q, of_k = self._tables(q, seqlen_offset, max_seqlen)
        given = self.interleaved, False, seqlen_offset, cu_seqlens
        return rotary_embedding(q, *of_q, *given), rotary_embedding(k, *of_k, *given)

    def _tables(
        self, q: Tensor, seqlen_offset: int | Tensor, max_seqlen: int | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """cos and sin of q, and those of k."""
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = q.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=q.device, dtype=q.dtype)
        cos, sin, cos_k, sin_k = (
            self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        )  # fmt: skip
        if cos is None or sin is None:
            raise ValueError("max_seqlen: want it with a tensor seqlen_offset, got None")
        return (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}, interleaved={self.interleaved}"
