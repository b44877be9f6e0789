# pyright: reportCallIssue=false, reportIndexIssue=false
"""Launches of the walk (walk.py): no synchronisation, nothing that depends on device values.

Memory beyond results: with grouped heads the gradients of q and k for each value head; for a
gate's gradient, float32, one number a token, head and tile, and a state every SPAN chunks.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.terms import Terms
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.tiles import SPAN, Tile, choose, family
from slipstream.kernels.linear.triton.walk import linear_walk_kernel


class Walk(NamedTuple):
    """One launch: tensors by the names of walk.py, y and the states allocated."""

    r: Tensor
    w: Tensor
    x: Tensor
    y: Tensor
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    scale_in: float = 1.0
    scale_out: float = 1.0
    reverse: bool = False
    transposed: bool = False


class GateSums(NamedTuple):
    """What the dq and the dk walk share for dg, by the names of walk.py."""

    rows: Tensor
    dg: Tensor
    anchors: Tensor


@cache
def _family(device: torch.device) -> str:
    return family(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"


@cache
def _tile(device: torch.device, D: int, X: int, bytes_each: int, gated: bool) -> tuple[Tile, int]:
    return choose("interpreter" if INTERPRETED else _family(device), D, X, bytes_each, gated)


def _on(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def forward(terms: Terms, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32."""
    terms = _contiguous(terms)
    o = terms.v.new_empty(terms.v.shape)
    final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
    with _on(o.device):
        _launch(
            Walk(terms.q, terms.k, terms.v, o, s_in=terms.initial_state, s_out=final), terms, scale
        )
    return o, final


def backward(
    terms: Terms,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    *,
    gate_gradient: bool = True,
) -> dict[str, Tensor]:
    """Gradients by the name of the term, in its shape and dtype; dg only with gate_gradient."""
    terms = _contiguous(terms)
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
    back: dict[str, Any] = {"transposed": True}
    with _on(q.device):
        sums = _gate_sums(terms) if gate_gradient and terms.g is not None else None
        _launch(Walk(do, v, k, dq, s_in=terms.initial_state, **back), terms, scale, sums, q)
        _launch(Walk(v, do, q, dk, s_in=dfinal, **over, **back), terms, scale, sums, k)
        _launch(Walk(k, q, do, dv, s_in=dfinal, s_out=dstate, **over), terms, scale)
        if HV != H:
            dq, dk = (x.view(B, T, H, HV // H, K).sum(3) for x in (dq, dk))
        grads = {"q": dq, "k": dk, "v": dv}
        if dstate is not None:
            grads["initial_state"] = dstate
        if sums is not None and terms.g is not None:
            dg = sums.dg.sum(0) if sums.dg.shape[0] > 1 else sums.dg[0]
            grads["g"] = dg.view(terms.g.shape).to(terms.g.dtype)
    return grads


def _contiguous(terms: Terms) -> Terms:
    """q, k, v and the state as the kernels index them; g has strides."""
    state = terms.initial_state
    return terms._replace(
        q=terms.q.contiguous(),
        k=terms.k.contiguous(),
        v=terms.v.contiguous(),
        initial_state=None if state is None else state.contiguous(),
        cu_seqlens=None if terms.cu_seqlens is None else terms.cu_seqlens.contiguous(),
    )


def _gate_sums(terms: Terms) -> GateSums:
    B, T, HV, V = terms.v.shape
    K = terms.q.shape[-1]
    tile, _ = _tile(terms.q.device, V, K, terms.q.element_size(), True)
    NX = -(-K // tile.BX)
    span = SPAN * tile.C
    spans = B * -(-T // span) if terms.cu_seqlens is None else T // span + terms.sequences
    wide = {"dtype": torch.float32, "device": terms.q.device}
    return GateSums(
        rows=torch.empty(NX, HV, B * T, **wide),
        dg=torch.empty(NX, B * T, HV, **wide),
        anchors=torch.empty(spans, HV, V, K, **wide),
    )


def _launch(
    walk: Walk,
    terms: Terms,
    scale: float,
    sums: GateSums | None = None,
    qk: Tensor | None = None,
) -> None:
    r, w, x, y = walk.r, walk.w, walk.x, walk.y
    B, T, HV, X = y.shape
    D = r.shape[-1]
    g, cu = terms.g, terms.cu_seqlens
    tile, BD = _tile(y.device, D, X, y.element_size(), g is not None)
    strides = (0, 0, 0) if g is None else g.stride()
    grid = (-(-X // tile.BX) * HV * terms.sequences,)
    linear_walk_kernel[grid](
        r,
        w,
        x,
        y,
        g,
        walk.s_in,
        walk.s_out,
        qk if sums else None,
        sums.rows if sums else None,
        sums.dg if sums else None,
        sums.anchors if sums else None,
        cu,
        scale,
        walk.scale_in,
        walk.scale_out,
        T,
        HV,
        r.shape[2],
        x.shape[2],
        B * T,
        *strides,
        D=D,
        X=X,
        BD=BD,
        BX=tile.BX,
        C=tile.C,
        SPAN=SPAN,
        REVERSE=walk.reverse,
        TRANSPOSED=walk.transposed,
        HAS_GATE=g is not None,
        HAS_DG=sums is not None,
        HAS_S_IN=walk.s_in is not None,
        HAS_S_OUT=walk.s_out is not None,
        PACKED=cu is not None,
        GROUPED=terms.q.shape[2] != HV,
        EXACT=y.dtype == torch.float32,
        PRECISION="ieee" if INTERPRETED else "tf32x3",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
