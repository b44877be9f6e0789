"""Launches of the chunk kernels of per-channel decay, and of free a and b."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import Segments, num_sequences
from slipstream.kernels.linear.triton.delta.tiles import KernelTile
from slipstream.kernels.linear.triton.dplr.chunk import (
    dplr_chunk_dstate_kernel,
    dplr_chunk_fwd_kernel,
)
from slipstream.kernels.linear.triton.dplr.tiles import DplrTile, choose
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.tiles import family_of
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached


class IntraChunk(NamedTuple):
    """By the names of wy.py."""

    q: Tensor
    w: Tensor
    b: Tensor
    k: Tensor | None
    u: Tensor
    total: Tensor | None
    qb: Tensor
    qk: Tensor | None
    ak: Tensor | None
    r: Tensor | None
    strong: Tensor | None

    def pointers(self) -> dict[str, Tensor | None]:
        """Arguments of the kernels that write it."""
        written = {f"{name}_out_ptr": x for name, x in zip("qwbku", self)}
        return written | {f"{name}_ptr": x for name, x in zip(self._fields[5:], self[5:])}


@cache
def _tile(
    device: torch.device, K: int, V: int, bytes_each: int, free: bool
) -> tuple[DplrTile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), K, V, bytes_each, free)


def tile_of(terms: LinearInputs) -> tuple[DplrTile, int]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size(), terms.transition == "dplr")


def launch_options(
    terms: LinearInputs, kernel_tile: KernelTile, is_scan: bool = False
) -> dict[str, Any]:
    # three products for one over 256 channels at once leave the compiler not a register
    simple = is_scan and terms.q.shape[-1] > 128
    return {
        "C": tile_of(terms)[0].C,
        "PACKED": terms.cu_seqlens is not None,
        "PRECISION": "ieee" if simple else fp32_dot_precision(),
        "num_warps": kernel_tile.warps,
        "num_stages": kernel_tile.stages,
    }


def chunk_fwd(
    terms: LinearInputs,
    intra: IntraChunk,
    *,
    o: Tensor | None = None,
    x: Tensor | None = None,
    states: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    m: Tensor | None = None,
    segments: Segments | None = None,
    prefix: PrefixStates | None = None,
) -> None:
    """Writes the tensors that are given: o; or x and the states before each chunk; or, of segments,
    m and their term of the state, s_out."""
    HV, V = terms.v.shape[2:]
    tile, WIDE = tile_of(terms)
    make = "ends" if m is not None else "o" if states is None else "states"
    kernel_tile = tile.fwd if make == "o" else tile.fwd_states
    tiles = -(-V // kernel_tile.B) + (
        -(-terms.q.shape[-1] // kernel_tile.B) if make == "ends" else 0
    )
    launch: Any = cached(dplr_chunk_fwd_kernel)[(tiles * HV * num_sequences(terms, segments),)]
    launch(
        v_ptr=None if intra.k is None else terms.v,
        q_ptr=intra.q if make == "o" else None,
        w_ptr=intra.w,
        b_ptr=intra.b,
        k_ptr=intra.k,
        u_ptr=intra.u,
        x_ptr=x,
        total_ptr=intra.total,
        qb_ptr=intra.qb if make == "o" else None,
        qk_ptr=intra.qk if make == "o" else None,
        o_ptr=o,
        states_ptr=states,
        s_in_ptr=s_in,
        s_out_ptr=s_out,
        m_ptr=m,
        **token_args(terms, segments),
        K=terms.q.shape[-1],
        V=V,
        WIDE=WIDE,
        BV=kernel_tile.B,
        OUTPUT=make,
        DELTA=terms.transition == "delta",
        HAS_GATE=terms.g is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=segments is not None,
        **(prefix.pointers() if prefix else NO_POINTERS),
        **launch_options(terms, kernel_tile, is_scan=make == "o"),
    )


def chunk_dstate(
    terms: LinearInputs,
    do: Tensor,
    intra: IntraChunk,
    *,
    y: Tensor | None = None,
    dstates: Tensor | None = None,
    s_in: Tensor | None = None,
    s_out: Tensor | None = None,
    segments: Segments | None = None,
) -> None:
    """Writes the tensors that are given: y and dstates; or, of segments, s_out alone."""
    HV, V = terms.v.shape[2:]
    tile, WIDE = tile_of(terms)
    kernel_tile = tile.dstate
    launch: Any = cached(dplr_chunk_dstate_kernel)[
        (-(-V // kernel_tile.B) * HV * num_sequences(terms, segments),)
    ]
    launch(
        do_ptr=do,
        q_ptr=intra.q,
        w_ptr=intra.w,
        b_ptr=intra.b,
        total_ptr=intra.total,
        qb_ptr=intra.qb,
        r_ptr=None if y is None else intra.r,
        y_ptr=y,
        states_ptr=dstates,
        s_in_ptr=s_in,
        s_out_ptr=s_out,
        **token_args(terms, segments),
        K=terms.q.shape[-1],
        V=V,
        WIDE=WIDE,
        BV=kernel_tile.B,
        OUTPUT="ends" if y is None else "states",
        HAS_GATE=terms.g is not None,
        HAS_S_IN=s_in is not None,
        HAS_S_OUT=s_out is not None,
        SPLIT=segments is not None,
        **launch_options(terms, kernel_tile, is_scan=True),
    )


def token_args(terms: LinearInputs, segments: Segments | None) -> dict[str, Any]:
    """Arguments of the kernels that go from chunk to chunk."""
    T, HV = terms.v.shape[1:3]
    segment = T if segments is None else segments.tokens
    return {
        "cu_ptr": terms.cu_seqlens,
        "T": T,
        "N": terms.sequences,
        "HV": HV,
        "segment": segment,
    }
