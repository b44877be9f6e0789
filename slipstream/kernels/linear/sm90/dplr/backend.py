"""Per-channel decay, and free a and b, on sm_90 in 16 bits: kernels in the place of Triton's.

Triton's stay for the gradients where supports_dqkg refuses a call, and between segments.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities, Exchange
from slipstream.kernels.linear.inputs import LinearInputs, pointers
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import CHUNK, Segments, dplr_sm90, num_sequences
from slipstream.kernels.linear.sm90.common.tma import align16, align_for_tma, tma_descriptor
from slipstream.kernels.linear.sm90.delta import segment_launch
from slipstream.kernels.linear.sm90.dplr.chunk_dstate import dplr_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.chunk_fwd import dplr_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.dqkg import dplr_dqkg_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.intra_safe import dplr_intra_safe_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.intra_safe_bwd import dplr_intra_safe_bwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.scores import dplr_scores_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.wy import dplr_wy_sm90_kernel
from slipstream.kernels.linear.triton.dplr.backend import ChunkStates, ScoreGrads, TritonDplr
from slipstream.kernels.linear.triton.dplr.launch import IntraChunk, token_args
from slipstream.kernels.linear.triton.dplr.tiles import ANCHORED_TILES, APART, SHIFT
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached

CAPABILITIES = BackendCapabilities(exchanges=True)
# Three programs fit a multiprocessor. Rows have the same bits in both kernels only where the
# compiler fuses no products and sums, which it would do differently in each.
WY_OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}
# by V: of 8 and 12 warps, what all partitions share
CHUNK_OPTIONS = {64: {"num_warps": 4, "maxnreg": 128}, 128: {"num_warps": 4, "maxnreg": 168}}
STAGES = 3
SAFE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
SAFE_PROGRAMS = 2  # a multiprocessor
BWD_UNITS = 8  # of a program of the gradients of strong chunks, which most calls do not have
# Of the gradients: channels of K at a time, warps beside each other, each four rows of them, and
# what a gate may be.
TILE_K, WIDE = 64, 2
_GATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def intra_chunk(terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool) -> None:
    """As TritonDplr.intra_chunk."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    programs = intra.u.shape[0] * HV
    common: dict[str, Any] = {
        **pointers(terms, ("v", "write", "g", "beta")),
        **intra.pointers(),
        "cu_ptr": terms.cu_seqlens,
        "scale": scale,
        "keep": int(for_backward),
        "T": T,
        "N": terms.sequences,
        "HV": HV,
        "H": H,
        "token_heads": _token_stride(terms.v) // V,
        "K": K,
        "V": V,
        "DELTA": terms.transition == "delta",
        "CHANNEL": terms.decay == "channel",
        "PACKED": terms.cu_seqlens is not None,
        "LIMIT": ANCHORED_TILES[terms.v.dtype],
        "APART": APART[terms.v.dtype] if terms.g is not None else 0.0,
    }
    run: Any = cached(dplr_wy_sm90_kernel)[(programs,)]
    run(
        **_rows(terms, 64),
        C=CHUNK,
        HAS_GATE=terms.g is not None,
        **common,
        **WY_OPTIONS,
    )
    if terms.g is not None:
        most = SAFE_PROGRAMS * sm_count(terms.v.device.index)
        run = cached(dplr_intra_safe_sm90_kernel)[(min(most, programs),)]
        run(**_pointers(terms), total=programs, **common, **SAFE_OPTIONS)


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
    m_is_zero: Tensor | None = None,
    segments: Segments | None = None,
    prefix: PrefixStates | None = None,
) -> None:
    """As the Triton kernel's launch. m_is_zero: with m, where that is not written."""
    make = "ends" if m is not None else "o" if states is None else "states"
    if make != "o":
        intra = intra._replace(q=None, qb=None, qk=None)  # o alone wants these
    q, w, b, k, u, total, qb, qk, *_ = intra
    HV, V, K = *terms.v.shape[2:], terms.q.shape[-1]
    v = None if k is None else terms.v
    two_stages = k is not None and (K == 128 or make != "o")
    columns = 1 + -(-K // V) if make == "ends" else 1
    run: Any = cached(dplr_chunk_fwd_sm90_kernel)[(columns * HV * num_sequences(terms, segments),)]
    run(
        q_desc=_chunks(q),
        w_desc=_chunks(w),
        b_desc=_chunks(b),
        k_desc=_chunks(k),
        qb_desc=_chunks(qb),
        qk_desc=_chunks(qk),
        v_desc=_tokens(v, 64),
        o_desc=_tokens(o, 64),
        x_desc=_chunks(x),
        states_desc=_chunks(states),
        o_ptr=o,
        u_ptr=u,
        total_ptr=total,
        s_in_ptr=s_in,
        s_out_ptr=s_out,
        m_ptr=m,
        m_is_zero_ptr=m_is_zero,
        w_ptr=None if m is None else w,
        b_ptr=None if m is None else b,
        **token_args(terms, segments),
        **(prefix.pointers() if prefix else NO_POINTERS),
        token_heads=HV if o is None else _token_stride(o) // V,
        OUTPUT=make,
        ST=2 if two_stages else STAGES,
        DELTA=terms.transition == "delta",
        **_flags(terms, s_in, s_out, segments),
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
    """As the Triton kernel's launch."""
    HV, V = terms.v.shape[2:]
    run: Any = cached(dplr_chunk_dstate_sm90_kernel)[(HV * num_sequences(terms, segments),)]
    run(
        do_desc=tma_descriptor(do, HV * V, CHUNK, 64),
        q_desc=_chunks(intra.q),
        w_desc=_chunks(intra.w),
        b_desc=_chunks(intra.b),
        qb_desc=_chunks(intra.qb),
        r_desc=_chunks(None if y is None else intra.r),
        y_desc=_chunks(y),
        states_desc=_chunks(dstates),
        total_ptr=intra.total,
        s_in_ptr=s_in,
        s_out_ptr=s_out,
        **token_args(terms, segments),
        TRANSITION_ONLY=y is None,
        ST=2,
        **_flags(terms, s_in, s_out, segments),
    )


class Sm90Dplr(TritonDplr):
    intra_chunk = staticmethod(intra_chunk)
    chunk_fwd = staticmethod(chunk_fwd)
    chunk_dstate = staticmethod(chunk_dstate)
    choose_segments = staticmethod(dplr_sm90)

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return super().to_kernel_layout(align_for_tma(terms))

    def forward_layout(self, terms: LinearInputs) -> LinearInputs:
        """Views of some heads are not copied."""
        aligned = align_for_tma(terms)
        if aligned.row_heads is None:
            return super().forward_layout(aligned)
        alone = {name: getattr(terms, name) for name in ("initial_state", "cu_seqlens")}
        given = {name: x.contiguous() for name, x in alone.items() if x is not None}
        return aligned._replace(**given)

    def contiguous(self, x: Tensor) -> Tensor:
        return align16(x).contiguous()

    def segment_transition(
        self, terms: LinearInputs, intra: IntraChunk, segments: Segments
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As TritonDplr's, and where M counts as zero."""
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        E = intra.u.new_empty(segments.count, HV, K, V)
        M = intra.u.new_empty(segments.count, HV, K, K)
        m_is_zero = M.new_empty(segments.count, HV, dtype=torch.int32)
        chunk_fwd(terms, intra, s_out=E, m=M, m_is_zero=m_is_zero, segments=segments)
        return E, (M, m_is_zero)

    def state_passing(
        self,
        terms: LinearInputs,
        segments: Segments,
        E: Tensor,
        M: tuple[Tensor, Tensor],
        s_in: Tensor | None,
        s_out: Tensor | None,
        reverse: bool = False,
        exchange: Exchange | None = None,
    ) -> Tensor:
        given = terms, E, M[0], M[1], s_in, segments, exchange
        return segment_launch.state_passing(*given, reverse=reverse, s_out=s_out)

    def launch_scores(
        self,
        terms: LinearInputs,
        do: Tensor,
        intra: IntraChunk,
        states: ChunkStates,
        scores: ScoreGrads,
        grads: dict[str, Tensor],
        dbeta: Tensor | None,
        scale: float,
    ) -> None:
        aligned = grads["v"].data_ptr() % 16 == 0
        if terms.write is not None or not aligned or not supports_dqkg(terms, do):
            super().launch_scores(terms, do, intra, states, scores, grads, dbeta, scale)
            return
        T, HV, V = terms.v.shape[1:]
        K, delta = terms.q.shape[-1], terms.a is None
        x, y, _, dstates = states
        launch: Any = cached(dplr_scores_sm90_kernel)[(x.shape[0] * HV,)]
        launch(
            v_desc=tma_descriptor(terms.v, HV * V, CHUNK, V),
            do_desc=tma_descriptor(do, HV * V, CHUNK, V),
            x_desc=tma_descriptor(x, CHUNK, V, CHUNK),
            y_desc=tma_descriptor(y, CHUNK, V, CHUNK),
            k_desc=_chunks(intra.k),
            qk_desc=_chunks(intra.qk),
            ak_desc=_chunks(None if delta else intra.ak),
            dstates_desc=None if delta else tma_descriptor(dstates, K, V, K),
            dv_desc=tma_descriptor(grads["v"], HV * V, CHUNK, V),
            dv_ptr=grads["v"],
            beta_ptr=terms.beta,
            dbeta_ptr=dbeta,
            **scores.pointers(),
            cu_ptr=terms.cu_seqlens,
            scale=scale,
            T=T,
            N=terms.sequences,
            HV=HV,
            K=K,
            V=V,
            C=CHUNK,
            DELTA=delta,
            PACKED=terms.cu_seqlens is not None,
            num_warps=4,
            maxnreg=168 if delta else 255,  # three or two programs a multiprocessor
        )

    def launch_dqkg(
        self,
        terms: LinearInputs,
        do: Tensor,
        states: ChunkStates,
        scores: ScoreGrads,
        strong: Tensor | None,
        grads: dict[str, Tensor],
        dbeta: Tensor | None,
        scale: float,
    ) -> None:
        if not supports_dqkg(terms, do):
            super().launch_dqkg(terms, do, states, scores, strong, grads, dbeta, scale)
            return
        assert strong is not None
        B, T, HV, V = terms.v.shape
        H, K = terms.q.shape[2:]
        chunks = states.x.shape[0]
        common: dict[str, Any] = {
            "v_desc": None if terms.a is None else tma_descriptor(terms.v, HV * V, CHUNK, V),
            "do_desc": tma_descriptor(do, HV * V, CHUNK, V),
            "x_desc": tma_descriptor(states.x, CHUNK, V, CHUNK),
            "y_desc": tma_descriptor(states.y, CHUNK, V, CHUNK),
            "states_desc": tma_descriptor(states.states, K, V, TILE_K),
            "dstates_desc": tma_descriptor(states.dstates, K, V, TILE_K),
            "dqb_desc": _chunks(scores.qb),
            "dab_desc": _chunks(scores.ab),
            "dqk_desc": _chunks(scores.qk),
            "dak_desc": _chunks(scores.ak),
            "strong_ptr": strong,
            "beta_ptr": terms.beta,
            "diag_ptr": scores.diagonal,
            **{f"d{name}_ptr": grads.get(name) for name in "qkag"},
            "db_ptr": grads.get("b" if terms.erase is None else "erase"),
            "dbeta_ptr": dbeta,
            "cu_ptr": terms.cu_seqlens,
            "scale": scale,
            "T": T,
            "N": terms.sequences,
            "HV": HV,
            "H": H,
            "tokens": B * T,
            "K": K,
            "V": V,
            "BK": TILE_K,
            "C": CHUNK,
            "DELTA": terms.transition == "delta",
            "PACKED": terms.cu_seqlens is not None,
        }
        sms, total = sm_count(do.device.index), chunks * HV
        # the chunks whose quarters allow it, and then the others
        launch: Any = cached(dplr_dqkg_sm90_kernel)[(min(sms, total),)]
        launch(
            **_rows(terms, TILE_K),
            g_desc=tma_descriptor(terms.g, HV * K, CHUNK, TILE_K),
            total=total,
            NK=1 if dbeta is None else dbeta.shape[0] - 1,
            WIDE=WIDE,
            **common,
            num_warps=4 * WIDE,
            maxnreg=168,  # of 12 warps: what all partitions share
        )
        total *= K // TILE_K
        launch = cached(dplr_intra_safe_bwd_sm90_kernel)[
            (min(total, max(sms, total // BWD_UNITS)),)
        ]
        launch(
            total=total,
            **_pointers(terms),
            g_ptr=terms.g,
            LIMIT=ANCHORED_TILES[terms.v.dtype],
            SHIFT=SHIFT[terms.v.dtype],
            **common,
            num_warps=8,
        )


def supports_dqkg(terms: LinearInputs, do: Tensor) -> bool:
    """Whether the kernel takes a call: a gate a channel, K, V of 64 or 128, addresses for TMA."""
    q, v, g = terms.q, terms.v, terms.g
    if g is None or terms.decay != "channel" or g.dtype not in _GATE_DTYPES:
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or v.numel() * 2 // v.shape[-1] >= 2**31:
        return False
    read = (q, terms.k, v, g, terms.a, terms.b, terms.erase, do)
    return {q.shape[-1], v.shape[-1]} <= {64, 128} and not any(
        x is not None and x.data_ptr() % 16 for x in read
    )


def _flags(
    terms: LinearInputs, s_in: Tensor | None, s_out: Tensor | None, segments: Segments | None
) -> dict[str, Any]:
    """The constants of both kernels."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return {
        "K": K,
        "V": V,
        "C": CHUNK,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "HAS_S_OUT": s_out is not None,
        "SPLIT": segments is not None,
        "PACKED": terms.cu_seqlens is not None,
        **CHUNK_OPTIONS[V],
    }


def _rows(terms: LinearInputs, columns: int) -> dict[str, Any]:
    """Descriptors of q, k, a and b as rows of all heads, in tiles [CHUNK, columns]; what erases by
    gates of channels is read as b."""
    made = {f"{n}_desc": _tokens(getattr(terms, n), columns) for n in "qkab"}
    if terms.erase is not None:
        made["b_desc"] = _tokens(terms.erase, columns)
    return made


def _pointers(terms: LinearInputs) -> dict[str, Tensor | None]:
    """As _rows."""
    given = pointers(terms, "qkab")
    return given if terms.erase is None else given | {"b_ptr": terms.erase}


def _tokens(x: Tensor | None, columns: int) -> Any:
    """A descriptor of a tensor [B, T, heads, channels] as rows of its heads, CHUNK rows a tile."""
    if x is None:
        return None
    return tma_descriptor(x, x.shape[2] * x.shape[3], CHUNK, columns, _token_stride(x))


def _token_stride(x: Tensor) -> int:
    """Elements from one token to the next; x is dense, or a part of the heads of such a tensor."""
    B, T, heads, channels = x.shape
    return x.stride(1) if T > 1 else x.stride(0) if B > 1 else heads * channels


def _chunks(x: Tensor | None) -> Any:
    """A descriptor of a tensor of chunks [..., CHUNK or more rows, columns], CHUNK rows a tile."""
    return None if x is None else tma_descriptor(x, x.shape[-1], CHUNK, x.shape[-1])


_BACKEND = Sm90Dplr()
forward, backward = _BACKEND.forward, _BACKEND.backward
