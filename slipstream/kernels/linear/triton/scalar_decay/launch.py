"""Launches of the walk (chunk.py): no synchronisation, nothing that depends on device values.

Memory beyond results: with grouped heads the gradients of q and k for each value head; for a
gate's gradient, float32, one number a token, head and tile, and a state every SPAN chunks; for a
sequence that is split, a state a segment, once forward and twice backward.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.chunk import scalar_decay_chunk_kernel
from slipstream.kernels.linear.triton.scalar_decay.state_passing import (
    scalar_decay_dg_kernel,
    scalar_decay_state_passing_kernel,
)
from slipstream.kernels.linear.triton.scalar_decay.tiles import (
    ANCHOR_INTERVAL,
    Tile,
    choose,
    family,
    segment_tokens,
)
from slipstream.runtime.backends import device_of, fp32_dot_precision
from slipstream.runtime.launch_cache import cached

# the gate's gradient takes a third of the backward's time
CAPABILITIES = BackendCapabilities(skips_gate_grad=True)


class Segments(NamedTuple):
    """Sequences cut into `slots` segments of `tokens`."""

    tokens: int
    slots: int


def split_into_segments(terms: LinearInputs, tokens: int | None) -> Segments | None:
    """Segments of so many tokens, of packed sequences as many as there can be; or none."""
    if tokens is None:
        return None
    B, T = terms.v.shape[:2]
    packed = terms.cu_seqlens is not None
    return Segments(tokens, T // tokens + terms.sequences if packed else B * -(-T // tokens))


class ChunkLaunch(NamedTuple):
    """One launch: tensors by the names of chunk.py; y None where only the state is wanted."""

    r: Tensor
    w: Tensor
    x: Tensor
    y: Tensor | None
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    total: Tensor | None = None
    scale_in: float = 1.0
    scale_out: float = 1.0
    reverse: bool = False
    transposed: bool = False


class GateSums(NamedTuple):
    """What the dq and the dk walk leave for dg, by the names of chunk.py."""

    q_rows: Tensor
    k_rows: Tensor
    z: Tensor
    anchors: Tensor


class ScalarDecayBackend(NamedTuple):
    """What launches the walks in place of _launch's kernel, but where only the state is wanted."""

    walk: Callable[..., None]
    grads: Callable[..., None]  # dk and dv
    parts: int  # of k . dk, which are to be added
    span: int  # chunks from one anchor to the next


@cache
def family_of(device: torch.device) -> str:
    return family(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"


@cache
def _tile(device: torch.device, D: int, X: int, bytes_each: int, gated: bool) -> tuple[Tile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), D, X, bytes_each, gated)


def _tile_of(terms: LinearInputs) -> tuple[Tile, int]:
    """The forward walk's; C is that of all."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size(), terms.g is not None)


def forward(
    terms: LinearInputs, scale: float, own: ScalarDecayBackend | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32."""
    terms = contiguous(terms)
    o = terms.v.new_empty(terms.v.shape)
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    walk = ChunkLaunch(terms.q, terms.k, terms.v, o, s_in=terms.initial_state, s_out=final)
    with device_of(o.device):
        split = _choose_segments(terms)
        if split is not None:
            walk = _entry_states(walk, terms, split)._replace(s_out=None)
        launch = _launch if own is None else own.walk
        launch(walk, terms, scale, split)
    return o, final


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    *,
    gate_gradient: bool = True,
    own: ScalarDecayBackend | None = None,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype; dg only with gate_gradient."""
    terms = contiguous(terms)
    q, k, v = terms.q, terms.k, terms.v
    do = torch.zeros_like(v) if dout is None or scale == 0.0 else dout.contiguous()
    scale = scale or 1.0  # o does not depend on q, k, v then, and do is 0
    dfinal = None if dfinal is None else dfinal.contiguous()
    B, T, H, K = q.shape
    HV = v.shape[2]
    dq, dk = (q.new_empty(B, T, HV, K) for _ in range(2))
    dv, dstate = v.new_empty(v.shape), None
    if terms.initial_state is not None:
        dstate = terms.initial_state.new_empty(terms.state_shape)
    over: dict[str, Any] = {"scale_in": 1 / scale, "scale_out": scale, "reverse": True}
    kept = ChunkLaunch(q, k, v, None, s_in=terms.initial_state)
    back = ChunkLaunch(k, q, do, dv, s_in=dfinal, s_out=dstate, **over)
    with device_of(q.device):
        split = _choose_segments(terms)
        sums = None
        if gate_gradient and terms.g is not None:
            sums = _gate_sums(terms, split, own)
        if split is not None:
            kept = _entry_states(kept, terms, split)
            back = _entry_states(back, terms, split)
        dq_walk = kept._replace(r=do, w=v, x=k, y=dq, s_out=None, transposed=True)
        if split is not None:
            back = back._replace(s_out=None)
        if own is None:
            _launch(dq_walk, terms, scale, split, sums, q)
            dk_walk = back._replace(r=v, w=do, x=q, y=dk, s_out=None, transposed=True)
            _launch(dk_walk, terms, scale, split, sums, k)
            _launch(back, terms, scale, split)
        else:
            own.walk(dq_walk, terms, scale, split, sums, q)
            own.grads(back, dk, v, terms, scale, split, sums)
        if HV != H:
            dq, dk = (x.view(B, T, H, HV // H, K).sum(3) for x in (dq, dk))
        grads = {"q": dq, "k": dk, "v": dv}
        if dstate is not None:
            grads["initial_state"] = dstate
        if sums is not None:
            grads["g"] = _gate_gradient(terms, sums, split, own)
    return grads


def contiguous(terms: LinearInputs) -> LinearInputs:
    """q, k, v and the state as the kernels index them; g has strides, which count in 32 bits."""
    state, g = terms.initial_state, terms.g
    if g is not None and sum((n - 1) * s for n, s in zip(g.shape, g.stride())) >= 2**31:
        g = g.contiguous()
    return terms._replace(
        q=terms.q.contiguous(),
        k=terms.k.contiguous(),
        v=terms.v.contiguous(),
        g=g,
        initial_state=None if state is None else state.contiguous(),
        cu_seqlens=None if terms.cu_seqlens is None else terms.cu_seqlens.contiguous(),
    )


def _gate_gradient(
    terms: LinearInputs, sums: GateSums, split: Segments | None, own: ScalarDecayBackend | None
) -> Tensor:
    assert terms.g is not None
    B, T, HV = terms.g.shape
    cu = terms.cu_seqlens
    dg = torch.empty(B, T, HV, dtype=terms.g.dtype, device=terms.g.device)
    NX, spans, _ = sums.z.shape
    BH, TOKENS = 8, _checkpoint_interval(terms, own)
    cached(scalar_decay_dg_kernel)[-(-HV // BH) * spans,](
        sums.q_rows,
        sums.k_rows,
        sums.z,
        terms.g,
        dg,
        cu,
        T,
        terms.sequences,
        HV,
        B * T,
        T if split is None else split.tokens,
        spans,
        *terms.g.stride(),
        NX=NX,
        NK=sums.k_rows.shape[0],
        TOKENS=TOKENS,
        BT=min(256, TOKENS),
        BH=BH,
        PACKED=cu is not None,
        SPLIT=split is not None,
        num_warps=4,
    )
    return dg


def _choose_segments(terms: LinearInputs) -> Segments | None:
    """Decided by shapes alone."""
    B, T, HV, V = terms.v.shape
    tile, _ = _tile_of(terms)
    packed = terms.cu_seqlens is not None
    programs = -(-V // tile.BX) * HV * (1 if packed else B)
    return split_into_segments(terms, segment_tokens(programs, T, tile.C))


def _entry_states(walk: ChunkLaunch, terms: LinearInputs, split: Segments) -> ChunkLaunch:
    """The walk with the states that segments meet as s_in; fills s_out where there is one."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    HV = terms.v.shape[2]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
    states = torch.empty(split.slots, HV, K, V, **wide)
    total = torch.empty(split.slots, HV, **wide) if terms.g is not None else None
    ends = ChunkLaunch(
        walk.r, walk.w, walk.x, None, s_out=states, total=total, reverse=walk.reverse
    )
    _launch(ends, terms, 1.0, split)
    block = 1024
    cu = terms.cu_seqlens
    cached(scalar_decay_state_passing_kernel)[-(-(K * V) // block) * HV * terms.sequences,](
        states,
        total,
        walk.s_in,
        walk.s_out,
        cu,
        walk.scale_in,
        walk.scale_out,
        terms.q.shape[1],
        terms.sequences,
        HV,
        split.tokens,
        SIZE=K * V,
        BLOCK=block,
        REVERSE=walk.reverse,
        HAS_GATE=total is not None,
        HAS_S_IN=walk.s_in is not None,
        HAS_S_OUT=walk.s_out is not None,
        PACKED=cu is not None,
        num_warps=4,
    )
    return walk._replace(s_in=states, scale_in=1.0)


def _checkpoint_interval(terms: LinearInputs, own: ScalarDecayBackend | None) -> int:
    """Tokens."""
    return (ANCHOR_INTERVAL if own is None else own.span) * _tile_of(terms)[0].C


def _gate_sums(
    terms: LinearInputs, split: Segments | None, own: ScalarDecayBackend | None
) -> GateSums:
    B, T, HV, V = terms.v.shape
    K = terms.q.shape[-1]
    tile, _ = _tile(terms.q.device, V, K, terms.q.element_size(), True)
    NX = -(-K // tile.BX)
    span = _checkpoint_interval(terms, own)
    if split is not None:
        spans = split.slots * -(-split.tokens // span)
    else:
        spans = B * -(-T // span) if terms.cu_seqlens is None else T // span + terms.sequences
    wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
    return GateSums(
        q_rows=torch.empty(NX, HV, B * T, **wide),
        k_rows=torch.empty(NX if own is None else own.parts, HV, B * T, **wide),
        z=torch.empty(NX, spans, HV, **wide),
        anchors=torch.empty(spans, HV, V, K, **wide),
    )


def tma_descriptors(tensors: list[Tensor | None], widths: list[int], C: int) -> list[Any] | None:
    """Tensor descriptors [1, C, 1, width] of each, or None if one can't have any."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    given = [x for x in tensors if x is not None]
    if any(x.shape[-1] * x.element_size() % 16 or x.data_ptr() % 16 for x in given):
        return None
    return [
        None
        if x is None
        else TensorDescriptor(x, list(x.shape), list(x.stride()), [1, C, 1, width])
        for x, width in zip(tensors, widths)
    ]


def _launch(
    walk: ChunkLaunch,
    terms: LinearInputs,
    scale: float,
    split: Segments | None = None,
    sums: GateSums | None = None,
    qk: Tensor | None = None,
) -> None:
    r, w, x, y = walk.r, walk.w, walk.x, walk.y
    B, T, HX, X = x.shape
    HV, D = terms.v.shape[2], r.shape[-1]
    g, cu = terms.g, terms.cu_seqlens
    tile, BD = _tile(x.device, D, X, x.element_size(), g is not None)
    strides = (0, 0, 0) if g is None else g.stride()
    slots = terms.sequences if split is None else split.slots
    rows: list[Any] = [r, w, x, y, qk if sums else None]
    tiles = None
    if tile.tma and cu is None:
        tiles = tma_descriptors(rows, [BD, BD, tile.BX, tile.BX, tile.BX], tile.C)
    *rows, qk_rows = tiles or rows
    cached(scalar_decay_chunk_kernel)[-(-X // tile.BX) * HV * slots,](
        *rows,
        g,
        walk.s_in,
        walk.s_out,
        walk.total,
        qk_rows,
        (sums.k_rows if walk.reverse else sums.q_rows) if sums else None,
        sums.z if sums else None,
        sums.anchors if sums else None,
        cu,
        scale,
        walk.scale_in,
        walk.scale_out,
        T,
        terms.sequences,
        HV,
        r.shape[2],
        HX,
        B * T,
        T if split is None else split.tokens,
        sums.z.shape[1] if sums else 0,
        *strides,
        D=D,
        X=X,
        BD=BD,
        BX=tile.BX,
        C=tile.C,
        SPAN=ANCHOR_INTERVAL,
        REVERSE=walk.reverse,
        TRANSPOSED=walk.transposed,
        HAS_Y=y is not None,
        HAS_GATE=g is not None,
        HAS_DG=sums is not None,
        HAS_S_IN=walk.s_in is not None,
        HAS_S_OUT=walk.s_out is not None,
        SPLIT=split is not None,
        PACKED=cu is not None,
        GROUPED=terms.q.shape[2] != HV,
        TMA=tiles is not None,
        EXACT=x.dtype == torch.float32,
        PRECISION=fp32_dot_precision(),
        num_warps=tile.warps,
        # pointers take more shared memory: two programs then still fit a multiprocessor
        num_stages=min(tile.stages, 2) if tile.tma and tiles is None else tile.stages,
    )
