"""No transition, one gate a token or none, on sm_90: kernels in the place of Triton's.

They take and leave what Triton's do, but dk and dv are one kernel where K and V are 128. Nothing
depends on values on the device.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities, Exchange
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import (
    ANCHOR_INTERVAL,
    CHUNK,
    Segments,
    num_sequences,
    state_scan_sm90,
)
from slipstream.kernels.linear.sm90.common.tma import align16, align_for_tma, tma_descriptor
from slipstream.kernels.linear.sm90.scalar_decay.chunk_bwd import scalar_decay_chunk_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.scalar_decay.chunk_fwd import scalar_decay_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.scalar_decay.state_scan import (
    scalar_decay_state_scan_sm90_kernel,
)
from slipstream.kernels.linear.triton.scalar_decay import backend as triton
from slipstream.kernels.linear.triton.scalar_decay.backend import (
    ChunkLaunch,
    GateSums,
    TritonScalarDecay,
    common_args,
    gate_strides,
)
from slipstream.runtime.launch_cache import cached

HALF = 64
# tiles that are loaded ahead, forward and backward
STAGES, BACK_STAGES = 3, 2
SCAN_STAGES = 6  # of 16 KB
CAPABILITIES = BackendCapabilities(skips_gate_grad=True, exchanges=True)
WIDE, WIDE_STAGES = 256, 2
# of 16 warps: what all parts of a program share
_PROGRAM = {"num_warps": 4, "maxnreg": 128}
_WIDE_PROGRAM = {"num_warps": 8, "maxnreg": 128}


def launch_chunks(
    chunks: ChunkLaunch,
    terms: LinearInputs,
    scale: float,
    segments: Segments | None = None,
    sums: GateSums | None = None,
    qk: Tensor | None = None,
) -> None:
    """As TritonScalarDecay.launch_chunks, but where the state alone is wanted."""
    r, w, x, y = chunks[:4]
    assert y is not None
    X, D = x.shape[-1], r.shape[-1]
    halves = 1 if D == WIDE else X // HALF
    (programs,) = _grid(terms, segments)
    rows = None
    if sums is not None:
        rows = sums.k_rows if chunks.reverse else sums.q_rows
    # both halves of a program would write the same k . dk of later chunks, and the same z
    assert halves == 1 or sums is None or not chunks.reverse
    launch: Any = cached(scalar_decay_chunk_fwd_sm90_kernel)[(X // HALF // halves * programs,)]
    launch(
        r_desc=_tiles(r, D),
        w_desc=_tiles(w, D),
        x_desc=_tiles(x, HALF),
        y_desc=_tiles(y, HALF),
        q_desc=None if sums is None or qk is None else _tiles(qk, HALF),
        y_ptr=y,
        rows_ptr=rows,
        z_ptr=sums.z if sums and chunks.reverse else None,
        anchor_ptr=sums.anchors if sums else None,
        HR=r.shape[2],
        HX=x.shape[2],
        num_anchors=sums.z.shape[1] if sums else 0,
        **common_args(chunks, terms, scale, segments),
        **(chunks.prefix.pointers() if chunks.prefix else NO_POINTERS),
        D=D,
        X=X,
        C=CHUNK,
        ST=WIDE_STAGES if D == WIDE else STAGES,
        HALVES=halves,
        ANCHOR_INTERVAL=ANCHOR_INTERVAL,
        REVERSE=chunks.reverse,
        TRANSPOSED=chunks.transposed,
        **_flags(chunks, terms, segments, sums),
        **(_WIDE_PROGRAM if D == WIDE else _PROGRAM),
    )


class Sm90ScalarDecay(TritonScalarDecay):
    @staticmethod
    def dk_is_whole(terms: LinearInputs) -> bool:
        return terms.q.shape[-1] != WIDE

    launch_chunks = staticmethod(launch_chunks)

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        """q, k and v as TMA reads them; the gates of a head side by side."""
        g = terms.g
        if g is not None and g.stride(1) > 1:
            g = g.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        return super().to_kernel_layout(align_for_tma(terms)._replace(g=g))

    def forward(
        self,
        terms: LinearInputs,
        scale: float,
        exchange: Exchange | None = None,
        prefix: PrefixStates | None = None,
    ) -> tuple[Tensor, Tensor]:
        """By Triton's kernels where o is wanted in float32."""
        if terms.q.dtype == torch.float32:
            return triton.forward(terms, scale, exchange, prefix)
        return super().forward(terms, scale, exchange, prefix)

    def segments_of_equal_bits(self, terms: LinearInputs) -> Segments | None:
        return None if terms.q.shape[-1] == WIDE else state_scan_sm90(terms)

    def states_before(
        self, chunks: ChunkLaunch, terms: LinearInputs, segments: Segments
    ) -> ChunkLaunch:
        """As what it replaces, by a scan that makes no y."""
        k, v, g = terms.k, terms.v, terms.g
        (H, K), (HV, V) = k.shape[2:], v.shape[2:]
        shape = segments.count, HV, K, V
        states = torch.empty(shape, dtype=torch.float32, device=k.device)
        tiles = V // HALF * (K // HALF)
        launch: Any = cached(scalar_decay_state_scan_sm90_kernel)[(tiles * HV * terms.sequences,)]
        launch(
            w_desc=_tiles(k, HALF),
            x_desc=_tiles(v, HALF),
            g_ptr=g,
            s_in_ptr=chunks.s_in,
            s_out_ptr=chunks.s_out,
            states_ptr=states,
            cu_ptr=terms.cu_seqlens,
            T=v.shape[1],
            N=terms.sequences,
            HV=HV,
            HR=H,
            HX=HV,
            segment=segments.tokens,
            **gate_strides(g),
            D=K,
            X=V,
            BD=HALF,
            C=CHUNK,
            ST=SCAN_STAGES,
            HAS_GATE=g is not None,
            HAS_S_IN=chunks.s_in is not None,
            HAS_S_OUT=chunks.s_out is not None,
            PACKED=terms.cu_seqlens is not None,
            **_PROGRAM,
        )
        return chunks._replace(s_in=states, s_out=None)

    def backward(
        self,
        terms: LinearInputs,
        dout: Tensor | None,
        dfinal: Tensor | None,
        scale: float,
        gate_gradient: bool = True,
        exchange: Exchange | None = None,
    ) -> dict[str, Tensor]:
        dout = None if dout is None else align16(dout)
        return super().backward(terms, dout, dfinal, scale, gate_gradient, exchange)

    def launch_dkv(
        self,
        chunks: ChunkLaunch,
        dk: Tensor,
        v: Tensor,
        terms: LinearInputs,
        scale: float,
        segments: Segments | None,
        sums: GateSums | None,
    ) -> None:
        """As TritonScalarDecay.launch_dkv."""
        k, q, do, dv = chunks[:4]
        assert dv is not None
        if k.shape[-1] == WIDE:
            super().launch_dkv(chunks, dk, v, terms, scale, segments, sums)
            return
        K, V = k.shape[-1], do.shape[-1]
        launch: Any = cached(scalar_decay_chunk_bwd_sm90_kernel)[_grid(terms, segments)]
        launch(
            q_desc=_tiles(q, K),
            k_desc=_tiles(k, K),
            v_desc=_tiles(v, HALF),
            do_desc=_tiles(do, HALF),
            dk_desc=_tiles(dk, K),
            dv_desc=_tiles(dv, HALF),
            dk_ptr=dk,
            dv_ptr=dv,
            rows_ptr=sums.k_rows if sums else None,
            z_ptr=sums.z if sums else None,
            anchor_ptr=sums.anchors if sums else None,
            H=k.shape[2],
            num_anchors=sums.z.shape[1] if sums else 0,
            **common_args(chunks, terms, scale, segments),
            K=K,
            V=V,
            C=CHUNK,
            ST=BACK_STAGES,
            ANCHOR_INTERVAL=ANCHOR_INTERVAL,
            **_flags(chunks, terms, segments, sums),
            **_PROGRAM,
        )


def _grid(terms: LinearInputs, segments: Segments | None) -> tuple[int]:
    return (terms.v.shape[2] * num_sequences(terms, segments),)


def _flags(
    chunks: ChunkLaunch,
    terms: LinearInputs,
    segments: Segments | None,
    sums: GateSums | None,
) -> dict[str, Any]:
    return {
        "HAS_GATE": terms.g is not None,
        "HAS_DG": sums is not None,
        "HAS_S_IN": chunks.s_in is not None,
        "HAS_S_OUT": chunks.s_out is not None,
        "SPLIT": segments is not None,
        "PACKED": terms.cu_seqlens is not None,
    }


def _tiles(x: Tensor, columns: int) -> Any:
    """A descriptor of x as rows of all heads, in tiles [CHUNK, columns]."""
    return tma_descriptor(x, x.shape[2] * x.shape[3], CHUNK, columns)


_BACKEND = Sm90ScalarDecay()
forward, backward = _BACKEND.forward, _BACKEND.backward
