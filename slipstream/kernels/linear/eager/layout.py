"""Tokens to chunks and back.

The chunkwise path works on n = M * G chunks of C tokens: M steps of G independent rows. A batch has
G = B * HV rows and M = ceil(T / C) steps; packed sequences have G = HV rows in which the chunks of
all sequences follow one another. Places without a token hold zeros, which leave the state alone: no
decay, no write, no erase.
"""

import torch
from torch import Tensor

from slipstream.core.varlen import ChunkMap, check_cu_seqlens_values, chunk_map
from slipstream.kernels.linear.terms import Terms


class Layout:
    def __init__(self, terms: Terms, chunk: int) -> None:
        self.tokens, self.chunk, self.dtype = terms.q.shape[1], chunk, terms.dtype
        self.device = terms.q.device
        self.heads, self.state_shape = terms.v.shape[2], terms.state_shape
        self.map: ChunkMap | None = None
        if terms.cu_seqlens is None:
            self.batch, self.chunks = terms.q.shape[0], -(-self.tokens // chunk)
        else:
            check_cu_seqlens_values(terms.cu_seqlens, self.tokens)
            self.map = chunk_map(terms.cu_seqlens, self.tokens, chunk)
            self.batch, self.chunks = 1, self.map.token.shape[0]
        self.rows = self.batch * self.heads
        self.n = self.rows * self.chunks

    def empty(self, *rest: int) -> Tensor:
        """Uninitialised [n, C, ...] in the dtype of the arithmetic."""
        return torch.empty(self.n, self.chunk, *rest, dtype=self.dtype, device=self.device)

    def split(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, T, H or HV, ...] to [n, C, ...], each head of H repeated for its value heads."""
        heads, rest = x.shape[2], x.shape[3:]
        out = self.empty(*rest) if out is None else out
        if self.map is not None:
            x = x[0].index_select(0, self.map.token.flatten())  # [M C, H, ...]
            live = self.map.live.flatten().view(-1, *([1] * (x.dim() - 1)))
            x = torch.where(live, x, 0)[None]
        elif (pad := self.chunks * self.chunk - self.tokens) > 0:
            x = torch.cat([x, x.new_zeros(self.batch, pad, *x.shape[2:])], dim=1)
        x = x.reshape(self.batch, self.chunks, self.chunk, heads, *rest).transpose(0, 1)
        target = out.view(self.chunks, self.batch, heads, -1, self.chunk, *rest)
        target.copy_(x.movedim(3, 2)[:, :, :, None].expand_as(target))
        return out

    def merge(self, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """[n, C, ...] to `shape` [B, T, H or HV, ...], summed over value heads that share one."""
        heads, rest = shape[2], shape[3:]
        x = x.view(self.chunks, self.batch, heads, -1, self.chunk, *rest)
        x = (x.sum(3) if self.heads != heads else x[:, :, :, 0]).movedim(2, 3)  # [M, B, C, H, ...]
        out = torch.empty(shape, dtype=dtype, device=self.device)
        if self.map is not None:
            return out.copy_(x.flatten(0, 2).index_select(0, self.map.slot)[None])
        whole, left = divmod(self.tokens, self.chunk)
        out[:, : whole * self.chunk].unflatten(1, (whole, self.chunk)).copy_(x[:whole].movedim(0, 1))
        if left > 0:
            out[:, -left:] = x[whole, :, :left]
        return out

    def start(self, state: Tensor | None) -> Tensor:
        """States by sequence [N, HV, K, V], zeros if None, for the walk to own."""
        if state is None:
            return torch.zeros(self.state_shape, dtype=self.dtype, device=self.device)
        return state.to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def by_step(self, x: Tensor) -> Tensor:
        """[n, ...] as [M, G, ...]."""
        return x.view(self.chunks, self.rows, *x.shape[1:])

    def by_head(self, x: Tensor) -> Tensor:
        """[HV, ...] repeated to [n, 1, ...]."""
        x = x.to(self.dtype).expand(self.chunks, self.batch, *x.shape)
        return x.reshape(self.n, 1, *x.shape[3:])
