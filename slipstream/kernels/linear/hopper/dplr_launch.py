"""Launches of per-channel decay, or free a and b, on sm_90, in 16 bits: all but the gradients."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.gluon import TensorDescriptor, gl
from slipstream.kernels.kept import kept
from slipstream.kernels.launching import processors
from slipstream.kernels.linear.hopper.dplr_grads_launch import grads as grads
from slipstream.kernels.linear.hopper.dplr_grads_launch import scores as scores
from slipstream.kernels.linear.hopper.dplr_grads_launch import takes_grads as takes_grads
from slipstream.kernels.linear.hopper.dplr_prepare import dplr_prepare_sm90_kernel
from slipstream.kernels.linear.hopper.dplr_strong import TURN, dplr_strong_sm90_kernel
from slipstream.kernels.linear.hopper.dplr_walk import dplr_walk_sm90_kernel
from slipstream.kernels.linear.hopper.dplr_walk_back import dplr_walk_back_sm90_kernel
from slipstream.kernels.linear.terms import Terms

CHUNK = 64
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
PREPARE = {"num_warps": 4, "maxnreg": 168}  # three programs fit a multiprocessor
# by V: of 8 and 12 warps, what all parts share
WALK = {64: {"num_warps": 4, "maxnreg": 128}, 128: {"num_warps": 4, "maxnreg": 168}}
STAGES = 3
STRONG = {"num_warps": 4}
STRONG_PROGRAMS = 2  # a multiprocessor


def prepare(
    given: tuple[Tensor | None, ...],
    made: tuple[Tensor | None, ...],
    sizes: tuple[Any, ...],
    programs: int,
    flags: dict[str, Any],
) -> None:
    """Arguments are those of the portable kernel; made is written, of strong chunks too."""
    tiles = [None if x is None else _tiles(x, x.shape[2] * x.shape[3], 64) for x in given[:4]]
    common = {n: flags[n] for n in ("K", "V", "DELTA", "CHANNEL", "PACKED")}
    launch: Any = kept(dplr_prepare_sm90_kernel)[(programs,)]
    rest = {n: flags[n] for n in ("C", "HAS_GATE", "LIMIT")}
    launch(*tiles, *given[4:], *made, *sizes, **common, **rest, **PREPARE)
    if not flags["HAS_GATE"]:
        return
    device: Any = given[4]
    most = STRONG_PROGRAMS * processors(device.device.index)
    launch = kept(dplr_strong_sm90_kernel)[(min(most, -(-programs // TURN.value)),)]
    launch(*given, *made, *sizes[:3], programs, *sizes[3:], **common, **STRONG)


def walk(terms: Terms, prepared: Any, o: Tensor, final: Tensor) -> None:
    """o and final are written."""
    q, w, b, k, u, _, qb, qk, *_ = prepared
    HV, V = terms.v.shape[2:]
    few = STAGES if k is None or q.shape[-1] == 64 else 2
    tiles = (q, w, b, k, qb, qk, None if k is None else (terms.v, HV * V, 64), (o, HV * V, 64))
    _walk(terms, prepared, (*tiles, None, None), (o, u), final, ST=few, KEEP=False)


def keep(terms: Terms, prepared: Any, x: Tensor, states: Tensor) -> None:
    """x and the states before each chunk are written."""
    w, b, k, u = prepared[1:5]
    HV, V = terms.v.shape[2:]
    v = None if k is None else (terms.v, HV * V, 64)
    tiles = (None, w, b, k, None, None, v, None, x, states)
    _walk(terms, prepared, tiles, (None, u), None, ST=STAGES if k is None else 2, KEEP=True)


def _walk(
    terms: Terms,
    prepared: Any,
    tiles: tuple,
    pointers: tuple[Tensor | None, ...],
    final: Tensor | None,
    **flags: Any,
) -> None:
    T, HV, V = terms.v.shape[1:]
    launch: Any = kept(dplr_walk_sm90_kernel)[(HV * terms.sequences,)]
    launch(
        *map(_described, tiles),
        *pointers,
        prepared.total,
        terms.initial_state,
        final,
        terms.cu_seqlens,
        T,
        terms.sequences,
        HV,
        DELTA=terms.beta is not None,
        HAS_S_IN=terms.initial_state is not None,
        **_sizes(terms),
        **flags,
        **WALK[V],
    )


def walk_back(
    terms: Terms,
    do: Tensor,
    prepared: Any,
    y: Tensor,
    dstates: Tensor,
    dfinal: Tensor | None,
    dstate: Tensor | None,
) -> None:
    """y and dstates are written, and dstate."""
    T, HV, V = terms.v.shape[1:]
    p = prepared
    launch: Any = kept(dplr_walk_back_sm90_kernel)[(HV * terms.sequences,)]
    launch(
        *map(_described, ((do, HV * V, 64), p.q, p.w, p.b, p.qb, p.r, y, dstates)),
        p.total,
        dfinal,
        dstate,
        terms.cu_seqlens,
        T,
        terms.sequences,
        HV,
        ST=2,
        HAS_S_IN=dfinal is not None,
        HAS_S_OUT=dstate is not None,
        **_sizes(terms),
        **WALK[V],
    )


def _sizes(terms: Terms) -> dict[str, Any]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    flags = {"K": K, "V": V, "C": CHUNK}
    return flags | {"HAS_GATE": terms.g is not None, "PACKED": terms.cu_seqlens is not None}


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
