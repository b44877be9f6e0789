"""The scan in plain torch: in blocks of tokens, forward and backward, and the oracle of the tests.

    h_t = a_t h_{t-1} + x_t                                      a_t = exp(g_t)

Blocks of C tokens side by side: C steps inside them, all blocks at once, make of x each block's h
from a zero start and of a the product p_t of the decays since the block's start; then h gets p_t
times the end of the block before. Nothing is divided by a decay, so gates may be -inf.

The state before a sequence enters as a_t h_{-1} added to its first x, whose decay is then 0: from
there on packed sequences are one.

Backward is the same scan from the last token to the first, with D_t the whole gradient of h_t:

    D_t = dh_t + a_{t+1} D_{t+1}          dx_t = D_t          dg_t = D_t a_t h_{t-1}

Symbols: B batch, T tokens, D channels, N sequences, C tokens a block, M blocks.
Cost: 6 B T D flops; x and g read and h written once, the rest in cache, in about C + T / C steps.

The oracle is the recurrence token by token: plain differentiable torch in float32, or float64 for
float64 inputs. Cost: T steps of O(B D).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slipstream.common.checks import wide_dtype
from slipstream.common.linear_rows import CHUNK_ELEMENTS
from slipstream.common.varlen import by_sequence, check_cu_seqlens_values


def scan_reference(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns h [B, T, D] in x's dtype and the final state [N, D]."""
    h, final = by_sequence(_run, (x, g), initial_state, cu_seqlens)
    return h.to(x.dtype), final


def _run(x: Tensor, g: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(x)
    h = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype) if state is None else state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        h = g[:, t].to(dtype).exp() * h + x[:, t].to(dtype)
        outputs.append(h)
    return (torch.stack(outputs, dim=1) if outputs else x.to(dtype)), h


# tokens of a block; all blocks are scanned side by side
BLOCK = 64


class Sequences:
    """Where sequences begin and end: side by side in a batch, or packed in one row.

    first, last [T, 1]: whether packed token t is its sequence's first or last; None in a batch.
    """

    def __init__(self, cu_seqlens: Tensor | None, tokens: int) -> None:
        self.first = self.last = None
        if cu_seqlens is None:
            return
        check_cu_seqlens_values(cu_seqlens, tokens)
        begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        t = torch.arange(tokens, device=cu_seqlens.device)
        owner = torch.searchsorted(end, t, right=True).clamp(max=max(end.shape[0] - 1, 0))
        self.first, self.last = (t == begin[owner])[:, None], (t == end[owner] - 1)[:, None]
        self.live = (end > begin)[:, None]  # [N, 1]: has a token
        self.begin, self.end = (at.clamp(0, tokens - 1) for at in (begin, end - 1))

    def take(self, x: Tensor, *, last: bool = False) -> Tensor:
        """The first or last row of each sequence, [N, D]; any where it has no token."""
        if self.first is None:
            return x[:, -1 if last else 0]
        return x[0].index_select(0, self.end if last else self.begin)

    def add(self, x: Tensor, rows: Tensor, *, last: bool = False) -> None:
        """Adds rows [N, D] there, in place."""
        rows = rows.to(x.dtype)
        if self.first is None:
            x[:, -1 if last else 0] += rows
        else:
            x[0].index_add_(0, self.end if last else self.begin, torch.where(self.live, rows, 0))

    def where_empty(self, otherwise: Tensor | None, rows: Tensor) -> Tensor:
        """rows, but of sequences without a token `instead`."""
        if self.first is None:
            return rows
        value = rows.new_zeros(()) if otherwise is None else otherwise.to(rows.dtype)
        return torch.where(self.live, rows, value)


def scan_forward(
    x: Tensor, g: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h [B, T, D] in x's dtype and the final state [N, D]."""
    if x.numel() == 0:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = x.new_zeros(rows, x.shape[2], dtype=wide_dtype(x))
        return x.new_empty(x.shape), final if initial_state is None else final.copy_(initial_state)
    sequences, h = Sequences(cu_seqlens, x.shape[1]), _copy_as(x, wide_dtype(x))
    if initial_state is not None:
        sequences.add(h, sequences.take(g).to(h.dtype).exp() * initial_state)
    for block in _token_blocks(h):
        decay = _decay(g[:, block], h.dtype)
        if sequences.first is not None:
            decay.masked_fill_(sequences.first[block], 0)
        if block.start > 0:
            h[:, block.start].addcmul_(decay[:, 0], h[:, block.start - 1])
        _scan(decay, h[:, block], reverse=False)
    final = sequences.where_empty(initial_state, sequences.take(h, last=True))
    return h.to(x.dtype), final.clone(memory_format=torch.contiguous_format)


def scan_backward(
    g: Tensor,
    h: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dh: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, g and initial_state from h, the scan's result, and dh, dfinal."""
    if h.numel() == 0:
        dinitial = None if initial_state is None else initial_state.new_zeros(initial_state.shape)
        if dinitial is not None and dfinal is not None:
            dinitial.copy_(dfinal)
        return h.new_empty(h.shape), g.new_empty(g.shape), dinitial
    sequences, dtype = Sequences(cu_seqlens, h.shape[1]), wide_dtype(h)
    if dh is None:
        total = torch.zeros(h.shape, dtype=dtype, device=h.device)
    else:
        total = _copy_as(dh, dtype)
    if dfinal is not None:
        sequences.add(total, dfinal, last=True)
    for block in reversed(list(_token_blocks(total))):
        _scan_back(g, total, block, sequences)
    dg = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    for block in _token_blocks(total):
        _gate_gradient(g, h, total, block, sequences, dg)
    if initial_state is None:
        return total.to(h.dtype), dg, None
    entered = sequences.take(total) * sequences.take(g).to(dtype).exp()
    sequences.add(dg, entered * initial_state)
    dinitial = sequences.where_empty(dfinal, entered).to(initial_state.dtype)
    return total.to(h.dtype), dg, dinitial


def _scan_back(g: Tensor, total: Tensor, block: slice, sequences: Sequences) -> None:
    """The scan of D over one span, those after it done."""
    T = g.shape[1]
    after = _decay(g[:, block.start + 1 : block.stop + 1], total.dtype)  # a_{t+1}
    if block.stop == T:
        after = torch.cat([after, torch.zeros_like(total[:, :1])], dim=1)
    if sequences.last is not None:
        after.masked_fill_(sequences.last[block], 0)
    if block.stop < T:
        total[:, block.stop - 1].addcmul_(after[:, -1], total[:, block.stop])
    _scan(after, total[:, block], reverse=True)


def _gate_gradient(
    g: Tensor, h: Tensor, total: Tensor, block: slice, sequences: Sequences, dg: Tensor
) -> None:
    """D_t a_t h_{t-1}, with 0 for the state before a sequence."""
    grad = _decay(g[:, block], total.dtype).mul_(total[:, block])
    grad[:, 1:] *= h[:, block.start : block.stop - 1]
    grad[:, 0] *= h[:, block.start - 1] if block.start > 0 else 0
    if sequences.first is not None:
        grad.masked_fill_(sequences.first[block], 0)
    dg[:, block] = grad


def _copy_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _decay(g: Tensor, dtype: torch.dtype) -> Tensor:
    return g.to(dtype).exp()


def _token_blocks(h: Tensor) -> Iterator[slice]:
    T, width = h.shape[1], h[:, 0].numel()
    # On a CPU by spans whose decays stay in cache and whose memory is used again: 4096 tokens of
    # 1024 channels take 14 ms on one core, 30 as one span.
    step = max(BLOCK, CHUNK_ELEMENTS["cpu"] // width) if h.is_cpu else T
    for start in range(0, T, step):
        yield slice(start, min(start + step, T))


def _scan(decay: Tensor, h: Tensor, *, reverse: bool) -> None:
    """h_t = decay_t h_{t-1} + h_t (h_{t+1} if reverse) of [B, T, D] in place; decay is used up."""
    T = h.shape[1]
    if T < 2 * BLOCK:
        return _steps(decay.unbind(1), h.unbind(1), reverse)
    tail_tokens = T % BLOCK  # what the scan comes to last, token by token
    if reverse:
        body, tail = slice(tail_tokens, T), slice(0, tail_tokens + 1)
    else:
        body, tail = slice(0, T - tail_tokens), slice(T - tail_tokens - 1, T)
    blocks = (T // BLOCK, BLOCK)
    _scan_blocks(decay[:, body].unflatten(1, blocks), h[:, body].unflatten(1, blocks), reverse)
    return _steps(decay[:, tail].unbind(1), h[:, tail].unbind(1), reverse)


def _scan_blocks(p: Tensor, h: Tensor, reverse: bool) -> None:
    """The same of [B, M, C, D]; p becomes the products of decays from a block's start."""
    _steps(p.unbind(2), h.unbind(2), reverse, products=True)
    end = 0 if reverse else -1
    _steps(p[:, :, end].unbind(1), h[:, :, end].unbind(1), reverse)
    early, late = slice(None, -1), slice(1, None)
    before, now, tail = (late, early, late) if reverse else (early, late, early)
    h[:, now, tail].addcmul_(p[:, now, tail], h[:, before, end, None])


def _steps(
    decay: Sequence[Tensor], h: Sequence[Tensor], reverse: bool, *, products: bool = False
) -> None:
    order = slice(None, None, -1 if reverse else 1)
    decay, h = decay[order], h[order]
    for before, now, p_before, p_now in zip(h, h[1:], decay, decay[1:]):
        now.addcmul_(p_now, before)
        if products:
            p_now.mul_(p_before)
