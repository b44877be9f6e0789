"""Launches of per-channel decay, or free a and b, on sm_90, in 16 bits: all but the gradients."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.sm90.dplr.chunk_dstate import dplr_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.chunk_fwd import dplr_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.dqkg_launch import chunk_dqkg as chunk_dqkg
from slipstream.kernels.linear.sm90.dplr.dqkg_launch import scores as scores
from slipstream.kernels.linear.sm90.dplr.dqkg_launch import supports_dqkg as supports_dqkg
from slipstream.kernels.linear.sm90.dplr.intra_safe import (
    FLAGS_PER_LOAD,
    dplr_intra_safe_sm90_kernel,
)
from slipstream.kernels.linear.sm90.dplr.segment_policy import choose_segments as choose_segments
from slipstream.kernels.linear.sm90.dplr.wy import dplr_wy_sm90_kernel
from slipstream.kernels.linear.triton.delta.plan import num_segments_and_sequences
from slipstream.kernels.linear.triton.scalar_decay.launch import Segments
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor, gl
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached

CHUNK = 64
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
WY_OPTIONS = {"num_warps": 4, "maxnreg": 168}  # three programs fit a multiprocessor
# by V: of 8 and 12 warps, what all parts share
CHUNK_OPTIONS = {64: {"num_warps": 4, "maxnreg": 128}, 128: {"num_warps": 4, "maxnreg": 168}}
STAGES = 3
SAFE_OPTIONS = {"num_warps": 4}
SAFE_PROGRAMS = 2  # a multiprocessor


def wy(
    given: tuple[Tensor | None, ...],
    made: tuple[Tensor | None, ...],
    sizes: tuple[Any, ...],
    programs: int,
    flags: dict[str, Any],
) -> None:
    """Arguments are those of the portable kernel; made is written, of strong chunks too."""
    tiles = [None if x is None else _tiles(x, x.shape[2] * x.shape[3], 64) for x in given[:4]]
    common = {n: flags[n] for n in ("K", "V", "DELTA", "CHANNEL", "PACKED")}
    launch: Any = cached(dplr_wy_sm90_kernel)[(programs,)]
    rest = {n: flags[n] for n in ("C", "HAS_GATE", "LIMIT")}
    launch(*tiles, *given[4:], *made, *sizes, **common, **rest, **WY_OPTIONS)
    if not flags["HAS_GATE"]:
        return
    device: Any = given[4]
    most = SAFE_PROGRAMS * sm_count(device.device.index)
    launch = cached(dplr_intra_safe_sm90_kernel)[(min(most, -(-programs // FLAGS_PER_LOAD.value)),)]
    launch(*given, *made, *sizes[:3], programs, *sizes[3:], **common, **SAFE_OPTIONS)


def chunk_fwd(
    terms: LinearInputs,
    prepared: Any,
    *,
    o: Tensor | None,
    x: Tensor | None,
    states: Tensor | None,
    s_in: Tensor | None,
    s_out: Tensor | None,
    m: Tensor | None,
    split: Segments | None,
) -> None:
    """o; or x and the states before each chunk; or m, with s_out. What is given is written."""
    make = "ends" if m is not None else "o" if states is None else "states"
    q, w, b, k, u, total, qb, qk, *_ = prepared if make == "o" else _unread(prepared)
    HV, V, K = *terms.v.shape[2:], terms.q.shape[-1]
    v = None if k is None else (terms.v, HV * V, 64)
    tiles = (q, w, b, k, qb, qk, v, None if o is None else (o, HV * V, 64), x, states)
    few = k is not None and (K == 128 or make != "o")
    columns = 1 + -(-K // V) if make == "ends" else 1
    launch: Any = cached(dplr_chunk_fwd_sm90_kernel)[
        (columns * HV * num_segments_and_sequences(terms, split),)
    ]
    launch(
        *map(_described, tiles),
        o,
        u,
        total,
        s_in,
        s_out,
        m,
        *_tokens(terms, split),
        MAKE=make,
        ST=2 if few else STAGES,
        DELTA=terms.beta is not None,
        **_flags(terms, s_in, s_out, split),
    )


def _unread(prepared: Any) -> Any:
    """Without what o alone wants."""
    return prepared._replace(q=None, qb=None, qk=None)


def chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    prepared: Any,
    y: Tensor | None,
    dstates: Tensor | None,
    *,
    s_in: Tensor | None,
    s_out: Tensor | None,
    split: Segments | None,
) -> None:
    """What is given is written: y and dstates, or s_out alone."""
    HV, V = terms.v.shape[2:]
    p = prepared
    r = None if y is None else p.r
    launch: Any = cached(dplr_chunk_dstate_sm90_kernel)[
        (HV * num_segments_and_sequences(terms, split),)
    ]
    launch(
        *map(_described, ((do, HV * V, 64), p.q, p.w, p.b, p.qb, r, y, dstates)),
        p.total,
        s_in,
        s_out,
        *_tokens(terms, split),
        ENDS=y is None,
        ST=2,
        **_flags(terms, s_in, s_out, split),
    )


def _tokens(terms: LinearInputs, split: Segments | None) -> tuple[Any, ...]:
    """cu to segment."""
    T, HV = terms.v.shape[1:3]
    return terms.cu_seqlens, T, terms.sequences, HV, T if split is None else split.tokens


def _flags(
    terms: LinearInputs, s_in: Tensor | None, s_out: Tensor | None, split: Segments | None
) -> dict[str, Any]:
    """What both walks are compiled for."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return {
        "K": K,
        "V": V,
        "C": CHUNK,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "HAS_S_OUT": s_out is not None,
        "SPLIT": split is not None,
        "PACKED": terms.cu_seqlens is not None,
        **CHUNK_OPTIONS[V],
    }


def _described(x: Any) -> Any:
    """A descriptor of a tensor as its rows, or of (tensor, width of rows, columns of a tile)."""
    if x is None:
        return None
    return _tiles(*x) if isinstance(x, tuple) else _tiles(x, x.shape[-1], x.shape[-1])


def _tiles(x: Tensor, width: int, columns: int) -> Any:
    """A descriptor of x as rows of `width`, in tiles [CHUNK, columns]."""
    layout: Any = gl.NVMMASharedLayout.get_default_for([CHUNK, columns], _TYPES[x.dtype])
    shape, strides = [x.numel() // width, width], [width, 1]
    return TensorDescriptor(x, shape, strides, [CHUNK, columns], layout)
