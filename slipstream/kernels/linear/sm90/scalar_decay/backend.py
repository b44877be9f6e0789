"""Launches of the additive family's walks on sm_90, in the place of the portable launch's.

They take and leave what the portable walks do, but for dk and dv, which are one walk here.
Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90.delta.backend import align16, align_for_tma
from slipstream.kernels.linear.sm90.plan import CHUNK
from slipstream.kernels.linear.sm90.scalar_decay.chunk_bwd import scalar_decay_chunk_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.scalar_decay.chunk_fwd import scalar_decay_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.triton.scalar_decay import launch as portable
from slipstream.kernels.linear.triton.scalar_decay.tiles import ANCHOR_INTERVAL
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.launch_cache import cached

HALF = 64
STAGES, BACK_STAGES = 3, 2
CAPABILITIES = BackendCapabilities(skips_gate_grad=True)
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# of 16 warps: what all parts of a program share
_PROGRAM = {"num_warps": 4, "maxnreg": 128}


def forward(terms: LinearInputs, scale: float) -> tuple[Tensor, Tensor]:
    """As the portable one, which it is where o is wanted in float32."""
    if terms.q.dtype not in _TYPES:
        return portable.forward(terms, scale)
    return portable.forward(_ready(terms), scale, _BACKEND)


def backward(
    terms: LinearInputs,
    dout: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
    *,
    gate_gradient: bool = True,
) -> dict[str, Tensor]:
    """As the portable one."""
    dout = None if dout is None else align16(dout)
    over: dict[str, Any] = {"gate_gradient": gate_gradient, "own": _BACKEND}
    return portable.backward(_ready(terms), dout, dfinal, scale, **over)


def _ready(terms: LinearInputs) -> LinearInputs:
    """q, k and v as TMA reads them; the gates of a head side by side."""
    g = terms.g
    if g is not None and g.stride(1) > 1:
        g = g.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return align_for_tma(terms)._replace(g=g)


def _chunk_fwd(
    walk: portable.ChunkLaunch,
    terms: LinearInputs,
    scale: float,
    split: portable.Segments | None,
    sums: portable.GateSums | None = None,
    qk: Tensor | None = None,
) -> None:
    r, w, x, y = walk.r, walk.w, walk.x, walk.y
    assert y is not None
    X, D = x.shape[-1], r.shape[-1]
    launch: Any = cached(scalar_decay_chunk_fwd_sm90_kernel)[_grid(terms, split)]
    launch(
        _tiles(r, D),
        _tiles(w, D),
        _tiles(x, HALF),
        _tiles(y, HALF),
        None if sums is None or qk is None else _tiles(qk, HALF),
        y,
        terms.g,
        walk.s_in,
        walk.s_out,
        sums.q_rows if sums else None,
        sums.anchors if sums else None,
        terms.cu_seqlens,
        scale,
        walk.scale_in,
        walk.scale_out,
        *_sizes(terms, (r.shape[2], x.shape[2]), split),
        *_strides(terms),
        D=D,
        X=X,
        C=CHUNK,
        ST=STAGES,
        SPAN=_BACKEND.span,
        TRANSPOSED=walk.transposed,
        **_flags(walk, terms, split, sums),
    )


def _grads(
    back: portable.ChunkLaunch,
    dk: Tensor,
    v: Tensor,
    terms: LinearInputs,
    scale: float,
    split: portable.Segments | None,
    sums: portable.GateSums | None,
) -> None:
    """dk, and what the portable walk `back` gives."""
    k, q, do, dv = back.r, back.w, back.x, back.y
    assert dv is not None
    K, V = k.shape[-1], do.shape[-1]
    launch: Any = cached(scalar_decay_chunk_bwd_sm90_kernel)[_grid(terms, split)]
    launch(
        _tiles(q, K),
        _tiles(k, K),
        _tiles(v, HALF),
        _tiles(do, HALF),
        _tiles(dk, K),
        _tiles(dv, HALF),
        dk,
        dv,
        terms.g,
        back.s_in,
        back.s_out,
        sums.k_rows if sums else None,
        sums.z if sums else None,
        sums.anchors if sums else None,
        terms.cu_seqlens,
        scale,
        back.scale_in,
        back.scale_out,
        *_sizes(terms, (k.shape[2],), split),
        sums.z.shape[1] if sums else 0,
        *_strides(terms),
        K=K,
        V=V,
        C=CHUNK,
        ST=BACK_STAGES,
        SPAN=_BACKEND.span,
        **_flags(back, terms, split, sums),
    )


_BACKEND = portable.ScalarDecayBackend(_chunk_fwd, _grads, parts=1, span=ANCHOR_INTERVAL)


def _grid(terms: LinearInputs, split: portable.Segments | None) -> tuple[int]:
    return (terms.v.shape[2] * (terms.sequences if split is None else split.slots),)


def _sizes(
    terms: LinearInputs, heads: tuple[int, ...], split: portable.Segments | None
) -> tuple[int, ...]:
    """T to segment."""
    B, T, HV, _ = terms.v.shape
    segment = T if split is None else split.tokens
    return T, terms.sequences, HV, *heads, B * T, segment


def _strides(terms: LinearInputs) -> tuple[int, ...]:
    return (0, 0, 0) if terms.g is None else terms.g.stride()


def _flags(
    walk: portable.ChunkLaunch,
    terms: LinearInputs,
    split: portable.Segments | None,
    sums: portable.GateSums | None,
) -> dict[str, Any]:
    return {
        "HAS_GATE": terms.g is not None,
        "HAS_DG": sums is not None,
        "HAS_S_IN": walk.s_in is not None,
        "HAS_S_OUT": walk.s_out is not None,
        "SPLIT": split is not None,
        "PACKED": terms.cu_seqlens is not None,
        **_PROGRAM,
    }


def _tiles(x: Tensor, columns: int) -> Any:
    """A descriptor of x as rows of all heads, in tiles [CHUNK, columns]."""
    layout: Any = gl.NVMMASharedLayout.get_default_for([CHUNK, columns], _TYPES[x.dtype])
    width = x.shape[2] * x.shape[3]
    shape, strides = [x.numel() // width, width], [width, 1]
    return TensorDescriptor(x, shape, strides, [CHUNK, columns], layout)
