"""Matrices of zeros and ones, products of which with the gates of a chunk are sums of gates.

At [t, u] is a 1 if the gate of token u is between token t and an edge: one that follows t, up to
the edge, or one from the edge to t, by KIND with the gate of t itself:

    WRITES    where t follows the edge alone: what the state has of a write, or what a read sees
              after its own token's decay
    READS     where t comes before the edge alone: what a read sees before its own token's decay
    BOTH      nowhere: reads of that kind after the edge, and writes before it

Kernels read them from memory: computing them would be half of the instructions of a level.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.primitives.device import Names

# blocks of 2^BASE tokens
BASE = tl.constexpr(4)
EDGES = Names("START", "BLOCK", "MIDDLE")
KINDS = Names("WRITES", "READS", "BOTH")

_cached: dict[tuple[torch.device, int, torch.dtype], Tensor] = {}


def gate_ones(device: torch.device, C: int, dtype: torch.dtype) -> Tensor:
    """[2 + levels, 3, C, C], by edge and kind. The edges: the chunk's start, that of t's block of
    2^BASE tokens, and for each level the middle of its block of 2^(level + 1) tokens.

    Kept, but where a CUDA graph would own it: until its replay nothing would be there.
    """
    key = device, C, dtype
    if key not in _cached:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _made(device, C, dtype)
        # the copy waits for itself, so that any stream may read it; a record (call_recorder.py) has
        # the table, not how it was made
        with torch._C.DisableTorchFunction():
            _cached[key] = _made(torch.device("cpu"), int(C), dtype).to(device)
    return _cached[key]


def _made(device: torch.device, C: int, dtype: torch.dtype) -> Tensor:
    u = torch.arange(C, device=device)
    t, level = u[:, None], torch.arange(C.bit_length() - 1, device=device)[:, None, None]
    block, later = t >> BASE.value == u >> BASE.value, (t >> level) % 2 == 1
    kinds: list[Tensor] = []
    for after, before in ((t >= u, t < u), (t > u, t <= u), (t > u, t < u)):
        middle = (t >> level == u >> level) & torch.where(later, after, before)
        kinds.append(torch.stack([after, after & block, *middle]))
    return torch.stack(kinds, 1).to(dtype)


@triton.jit
def load_ones(
    ones_ptr, edge, C: tl.constexpr, KIND: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """[C, C] of gate_ones, or that TRANSPOSED; edge: of EDGES; of MIDDLE the level more."""
    o_c = tl.arange(0, C)
    b_ones = tl.load(ones_ptr + (edge * 3 + KIND) * (C * C) + o_c[:, None] * C + o_c[None, :])
    return tl.trans(b_ones) if TRANSPOSED else b_ones
