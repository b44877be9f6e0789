"""Tokens to chunks and back, a span of chunks at a time.

The chunkwise path works on n = M * G chunks of C tokens: M steps of G independent rows. A batch has
G = B * HV rows and ceil(T / C) steps in all; packed sequences have G = HV rows in which the chunks
of all sequences follow one another. Places without a token hold zeros, which leave the state alone:
no decay, no write, no erase.

A span is as many steps as fit the caches of a core, so that what is computed of it is still there
when it is used, and memory does not grow with T.

The only sequential part is the state carried from chunk to chunk:

    x_m     = rest_m + right_m S_m
    S_{m+1} = rows_m * S_m * columns_m + add_m + left_m^T x_m

Its backward pass is the same scan from the last chunk to the first with left and right exchanged.
Cost: 4 C K V flops a chunk and row.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.common.varlen import ChunkMap, check_cu_seqlens_values, chunk_map
from slipstream.kernels.linear.inputs import LinearInputs

# Elements of one [n, C, K] tensor of a span; 2^18 and 2^19 are best of 2^17 to 2^21 on a CPU.
BLOCK_ELEMENTS = 1 << 19


class Layout:
    def __init__(self, terms: LinearInputs, chunk: int) -> None:
        self.tokens, self.chunk, self.dtype = terms.q.shape[1], chunk, terms.dtype
        self.device = terms.q.device
        self.heads, self.state_shape = terms.v.shape[2], terms.state_shape
        self.map: ChunkMap | None = None
        if terms.cu_seqlens is None:
            self.batch, self.steps = terms.q.shape[0], -(-self.tokens // chunk)
        else:
            check_cu_seqlens_values(terms.cu_seqlens, self.tokens)
            self.map = chunk_map(terms.cu_seqlens, self.tokens, chunk)
            self.batch, self.steps = 1, self.map.token.shape[0]
        self.rows = self.batch * self.heads
        width = max(terms.q.shape[-1], terms.v.shape[-1])
        self.span_steps = max(1, BLOCK_ELEMENTS // max(1, self.rows * chunk * width))

    def spans(self, *, reverse: bool = False) -> Iterator["ChunkBlock"]:
        starts = range(0, self.steps, self.span_steps)
        for start in reversed(starts) if reverse else starts:
            yield ChunkBlock(self, start, min(start + self.span_steps, self.steps))

    def output(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """For ChunkBlock.merge to fill: [B, T, ...], with a spare token at the end if packed."""
        spare = 0 if self.map is None else 1
        return torch.empty(shape[0], shape[1] + spare, *shape[2:], dtype=dtype, device=self.device)

    def finish(self, out: Tensor) -> Tensor:
        return out if self.map is None else out[:, : self.tokens]

    def begin(self, state: Tensor | None) -> "Carry":
        """The scan's state before its first chunk, from that of each sequence [N, HV, K, V]."""
        if state is None:
            ends = torch.zeros(self.state_shape, dtype=self.dtype, device=self.device)
        else:
            ends = state.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        if self.map is None:
            return Carry(ends.view(-1, *ends.shape[-2:]), None)
        # one more sequence takes what the spare chunk slots produce
        ends = torch.cat([ends, ends.new_zeros(1, *ends.shape[1:])])
        return Carry(torch.zeros_like(ends[0]), ends)

    def end(self, carry: "Carry") -> Tensor:
        """The state of each sequence where the scan has left it, [N, HV, K, V]."""
        out = carry.S.view(self.state_shape) if carry.ends is None else carry.ends[:-1]
        return out.clone()


class Carry:
    """S [G, K, V], the state that comes to the next chunk; ends [N+1, HV, K, V] if packed."""

    def __init__(self, S: Tensor, ends: Tensor | None) -> None:
        self.S, self.ends = S, ends

    def copy(self) -> "Carry":
        return Carry(self.S.clone(), None if self.ends is None else self.ends.clone())


class ChunkBlock:
    """Steps `start` to `stop` - 1 of a layout."""

    def __init__(self, layout: Layout, start: int, stop: int) -> None:
        self.layout, self.start, self.steps = layout, start, stop - start
        self.n, self.chunk = self.steps * layout.rows, layout.chunk
        self.map: ChunkMap | None = None
        if layout.map is not None:
            cut = (x if i == 2 else x[start:stop] for i, x in enumerate(layout.map))
            self.map = ChunkMap(*cut)

    def empty(self, *rest: int) -> Tensor:
        """Uninitialised [n, C, ...] in the dtype of the arithmetic."""
        layout = self.layout
        return torch.empty(self.n, self.chunk, *rest, dtype=layout.dtype, device=layout.device)

    def split(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[B, T, H or HV, ...] to [n, C, ...], each head of H repeated for its value heads."""
        heads, rest = x.shape[2], x.shape[3:]
        out = self.empty(*rest) if out is None else out
        if self.map is not None:
            x = x[0].index_select(0, self.map.token.flatten())  # [M C, H, ...]
            live = self.map.live.flatten().view(-1, *([1] * (x.dim() - 1)))
            x = torch.where(live, x, 0)[None]
        else:
            begin, end = self._tokens()
            x = x[:, begin:end]
            if pad := self.steps * self.chunk - x.shape[1]:
                x = torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], dim=1)
        x = x.unflatten(1, (self.steps, self.chunk)).transpose(0, 1)
        target = out.view(self.steps, self.layout.batch, heads, -1, self.chunk, *rest)
        target.copy_(x.movedim(3, 2)[:, :, :, None].expand_as(target))
        return out

    def merge(self, x: Tensor, out: Tensor) -> None:
        """[n, C, ...] into the tokens of `out`, summed over the value heads that share a head."""
        heads, rest = out.shape[2], out.shape[3:]
        x = x.view(self.steps, self.layout.batch, heads, -1, self.chunk, *rest)
        x = x.sum(3) if self.layout.heads != heads else x[:, :, :, 0]
        x = x.movedim(2, 3)  # [M, B, C, H, ...]
        if self.map is not None:
            spare = torch.where(self.map.live, self.map.token, self.layout.tokens).flatten()
            out[0].index_copy_(0, spare, x.flatten(0, 2).to(out.dtype))
            return
        begin, end = self._tokens()
        whole, tail = divmod(end - begin, self.chunk)
        stop = begin + whole * self.chunk
        target = out[:, begin:stop].unflatten(1, (whole, self.chunk))
        target.copy_(x[:whole].movedim(0, 1))
        if tail > 0:
            out[:, stop:end] = x[whole, :, :tail]

    def _tokens(self) -> tuple[int, int]:
        begin = self.start * self.chunk
        return begin, min(begin + self.steps * self.chunk, self.layout.tokens)

    def by_step(self, x: Tensor) -> Tensor:
        """[n, ...] as [M, G, ...]."""
        return x.view(self.steps, self.layout.rows, *x.shape[1:])

    def by_head(self, x: Tensor) -> Tensor:
        """[HV, ...] repeated to [n, 1, ...]."""
        x = x.to(self.layout.dtype).expand(self.steps, self.layout.batch, *x.shape)
        return x.reshape(self.n, 1, *x.shape[3:])


class Step(NamedTuple):
    """The steps of all chunks; None is one for the factors and zero for the rest.

    rows [M, G, K or 1, 1], columns [M, G, 1, V], add [M, G, K, V];
    lhs, rhs [M, G, C, K] and rest [M, G, C, V], which becomes x: all three or none.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    add: Tensor | None = None
    lhs: Tensor | None = None
    rhs: Tensor | None = None
    rest: Tensor | None = None

    def unbind(self) -> list["Step"]:
        """A step for each m, without that dimension."""
        given = {name: x.unbind(0) for name, x in self._asdict().items() if x is not None}
        steps = len(next(iter(given.values())))
        return [Step(**{name: xs[m] for name, xs in given.items()}) for m in range(steps)]

    def advance(self, S: Tensor, out: Tensor) -> None:
        """From the state before a chunk to the one after it, [G, K, V] both; out may be S."""
        x = None
        if self.rhs is not None and self.rest is not None:
            x = self.rest.baddbmm_(self.rhs, S)  # [G, C, V]
        if self.rows is not None:
            torch.mul(S, self.rows, out=out)
        elif out is not S:
            out.copy_(S)
        if self.columns is not None:
            out.mul_(self.columns)
        if self.add is not None:
            out.add_(self.add)
        if self.lhs is not None and x is not None:
            out.baddbmm_(self.lhs.mT, x)


def state_scan(step: Step, carry: Carry, span: ChunkBlock, *, reverse: bool) -> Tensor:
    """Scans the chunks of a span, from the last one if `reverse`, and leaves `carry` behind them.

    Returns:
        The state that each chunk met, [n, K, V].
    """
    # Between chunks m - 1 and m the state is at place m; backwards it comes from place m + 1.
    states = carry.S.new_empty(span.steps + 1, *carry.S.shape)
    come, go = (1, 0) if reverse else (0, 1)
    states[span.steps if reverse else 0] = carry.S
    steps = step.unbind()
    for m in reversed(range(span.steps)) if reverse else range(span.steps):
        S = _enter(states[m + come], carry, span, m, reverse)
        steps[m].advance(S, states[m + go])
        _leave(states[m + go], carry, span, m)
    carry.S = states[0 if reverse else span.steps]
    return states[come : come + span.steps].flatten(0, 1)


def state_scan_in_place(
    step: Step, carry: Carry, span: ChunkBlock, reads: Tensor | None
) -> Tensor | None:
    """Scans forward keeping no states; what `reads` [M, G, C, K] see of them is [n, C, V]."""
    S, seen = carry.S, None
    if reads is not None:
        seen = S.new_empty(*reads.shape[:3], S.shape[-1])
    for m, one in enumerate(step.unbind()):
        S = _enter(S, carry, span, m, reverse=False)
        if reads is not None and seen is not None:
            torch.bmm(reads[m], S, out=seen[m])
        one.advance(S, S)
        _leave(S, carry, span, m)
    return None if seen is None else seen.flatten(0, 1)


def _enter(S: Tensor, carry: Carry, span: ChunkBlock, m: int, reverse: bool) -> Tensor:
    """S, with the state of its own sequence in place of it where the chunk begins one."""
    if span.map is None:
        return S
    assert carry.ends is not None
    begins = (span.map.last if reverse else span.map.first)[m]
    entry = carry.ends.index_select(0, span.map.sequence[m : m + 1])[0]
    return S.copy_(torch.where(begins, entry, S))


def _leave(S: Tensor, carry: Carry, span: ChunkBlock, m: int) -> None:
    if span.map is not None:
        assert carry.ends is not None
        carry.ends.index_copy_(0, span.map.sequence[m : m + 1], S[None])
