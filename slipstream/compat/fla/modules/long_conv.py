"""fla.modules.long_conv: causal convolutions as long as the sequence, by FFT in plain torch.

Source: Poli and others, "Hyena Hierarchy: Towards Larger Convolutional Language Models" (2023),
for the implicit filter and its positions; fla's long_conv.py for the interface and fft_conv.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fft_conv(
    u: Tensor,
    k: Tensor,
    dropout_mask: Tensor | None,
    gelu: bool = True,
    k_rev: Tensor | None = None,
) -> Tensor:
    """y_t = u_t + sum_{s <= t} k_{t-s} u_s.

    Args:
        u: [B, D, T]. Of four dimensions [B, D, X, T] with k [D, W], and [B, X, D, T] with
            [1, D, W], as there.
        k: the filter, [D, W] or [1, D, W], of which the first T numbers count. fla's wraps around
            where W is more than T + 1, so that the first results depend on the last inputs.
        dropout_mask: [B, D], a factor of the result.
        gelu: the result goes through gelu.
        k_rev: a filter of later tokens: the result is causal without it alone.

    Returns:
        y in u's shape and dtype. 16-bit inputs are convolved in float32.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    T = u.shape[-1]
    size = 2 * T
    k_f = torch.fft.rfft(k[..., :T].to(wide), n=size)
    if k_rev is not None:
        k_f = k_f + torch.fft.rfft(k_rev[..., :T].to(wide), n=size).conj()
    if u.dim() > 3:
        k_f = k_f.unsqueeze(1)
    y = torch.fft.irfft(torch.fft.rfft(u.to(wide), n=size) * k_f, n=size)[..., :T] + u
    if gelu:
        y = F.gelu(y)
    if dropout_mask is not None:
        y = y * dropout_mask.unsqueeze(-1)
    return y.to(u.dtype)


class LongConvolution(nn.Module):
    """fft_conv of x [B, T, D] with a filter of its own for each channel, at most max_len long."""

    def __init__(self, hidden_size: int, max_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.filter = nn.Parameter(torch.randn(hidden_size, max_len))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _check_length(x, self.filter.shape[-1])
        return fft_conv(x.mT, self.filter, dropout_mask=None, gelu=False).mT


class PositionalEmbedding(nn.Module):
    """Each position's share of seq_len, with cosines and sines: [1, seq_len, emb_dim]."""

    def __init__(self, emb_dim: int, seq_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.seq_len = seq_len
        bands = (emb_dim - 1) // 2
        share = torch.linspace(0, 1, seq_len)[:, None]
        angles = 2 * math.pi / seq_len * torch.linspace(0, seq_len - 1, seq_len)[:, None]
        angles = angles * torch.linspace(1e-4, bands - 1, bands)
        z = torch.cat([share, angles.cos(), -angles.sin()], dim=-1)
        self.z = nn.Parameter(z[None], requires_grad=False)

    def forward(self, L: int) -> Tensor:
        return self.z[:, :L]


class ImplicitLongConvolution(nn.Module):
    """fft_conv of x [B, T, D] with a filter that an MLP makes of each position.

    Args:
        max_len: the longest T.
        d_emb: features of a position, odd and at least 3. d_hidden: those within the MLP.
    """

    def __init__(
        self, hidden_size: int, max_len: int, d_emb: int = 3, d_hidden: int = 16, **kwargs: Any
    ) -> None:
        super().__init__()
        if d_emb % 2 == 0 or d_emb < 3:
            raise ValueError(f"d_emb: want an odd number from 3 on, got {d_emb}")
        self.hidden_size, self.d_emb = hidden_size, d_emb
        self.pos_emb = PositionalEmbedding(emb_dim=d_emb, seq_len=max_len)
        self.mlp = nn.Sequential(
            nn.Linear(d_emb, d_hidden), nn.ReLU(), nn.Linear(d_hidden, hidden_size)
        )

    def filter(self, seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """[1, D, seq_len]."""
        return self.mlp(self.pos_emb(seq_len)).mT

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        _check_length(x, self.pos_emb.seq_len)
        return fft_conv(x.mT, self.filter(x.shape[1]), dropout_mask=None, gelu=False).mT


def _check_length(x: Tensor, longest: int) -> None:
    if x.dim() != 3 or x.shape[1] > longest:
        raise ValueError(f"x: want [B, T, D] with T up to {longest} (max_len), got {list(x.shape)}")
