"""The stages of per-channel decay, and of free a and b, on sm_90 in 16 bits (kernels/linear/dplr.py
has their order): kernels in the place of Triton's.

KDA's forward is one kernel where programs suffice for it (segments.py, uses_fused_fwd).
Triton's stay for the gradients where supports_dqkg refuses a call, and between segments.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, prefix_states
from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.dplr import ChunkGrads, IntraChunk, dplr_args
from slipstream.kernels.linear.inputs import LinearInputs, pointers
from slipstream.kernels.linear.sm90 import common as tma
from slipstream.kernels.linear.sm90.delta import segment_launch
from slipstream.kernels.linear.sm90.dplr import chunk_dstate, intra_safe, intra_safe_bwd, wy
from slipstream.kernels.linear.sm90.dplr.chunk_fwd import dplr_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.dqkg import dplr_dqkg_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.fused_fwd import kda_fused_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.dplr.scores import dplr_scores_sm90_kernel
from slipstream.kernels.linear.triton.dplr.backend import TritonDplr
from slipstream.kernels.linear.triton.dplr.tiles import RANGES
from slipstream.runtime.backends import sm_count
from slipstream.runtime.launch_cache import cached

_GATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Sm90Dplr(TritonDplr):
    def fused_fwd(self, terms: LinearInputs, scale: float, o: Tensor, final: Tensor) -> bool:
        """Whether a backward follows or not. Views of some heads are for the other kernels."""
        if not segmentation.uses_fused_fwd(terms) or not terms.v.is_contiguous():
            return False
        (HV, V), (H, K) = terms.v.shape[2:], terms.q.shape[2:]
        segments = segmentation.fused_fwd_sm90(terms)
        programs = HV * segmentation.num_sequences(terms, segments)
        words, ends, r = o.new_empty, None, o
        if segments is not None:
            # of words several programs write one, and wait for it
            words, r = o.new_zeros, torch.empty_like(o)
            ends = o.new_empty(segments.count, HV, V, K, dtype=torch.float32)
        run: Any = cached(kda_fused_fwd_sm90_kernel)[(programs,)]
        args: dict[str, Any] = {
            **{f"{name}_desc": tma.token_tiles(getattr(terms, name), 64) for name in "qkvg"},
            "o_desc": tma.token_tiles(o, 64),
            "o_ptr": o,
            "r_desc": tma.token_tiles(r, 64),
            "r_ptr": r,
            "g_ptr": terms.g,
            "beta_ptr": terms.beta,
            "strong_ptr": words(2 * (HV * terms.sequences + programs), dtype=torch.int32),
            "ends_ptr": ends,
            "s_in_ptr": terms.initial_state,
            "s_out_ptr": final,
            "scale": scale,
            "H": H,
            "K": K,
            "V": V,
            "C": segmentation.CHUNK,
            "segment": terms.v.shape[1] if segments is None else segments.tokens,
            "SPLIT": segments is not None,
            "HAS_S_IN": terms.initial_state is not None,
            "HAS_S_OUT": True,
            **segmentation.sequence_args(terms),
            "num_warps": 4,
            "enable_fp_fusion": False,  # both launches have the same bits
        }
        run(**args, STRONG=False)
        run(**args, STRONG=True)  # heads with strong gates
        return True

    def choose_segments(self, terms: LinearInputs) -> segmentation.Segments | None:
        return segmentation.dplr_sm90(terms)

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return super().to_kernel_layout(tma.align_for_tma(terms))

    def forward_layout(self, terms: LinearInputs) -> LinearInputs:
        """Views of some heads are not copied."""
        aligned = tma.align_for_tma(terms)
        if aligned.row_heads is None:
            return super().forward_layout(aligned)
        alone = {name: getattr(terms, name) for name in ("initial_state", "cu_seqlens")}
        given = {name: x.contiguous() for name, x in alone.items() if x is not None}
        return aligned._replace(**given)

    def contiguous(self, x: Tensor) -> Tensor:
        return tma.align16(x).contiguous()

    def segment_transition(
        self, terms: LinearInputs, intra: IntraChunk, segments: segmentation.Segments
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As TritonDplr's, and where M counts as zero."""
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        E = intra.u.new_empty(segments.count, HV, K, V)
        M = intra.u.new_empty(segments.count, HV, K, K)
        m_is_zero = M.new_empty(segments.count, HV, dtype=torch.int32)
        self.chunk_fwd(terms, intra, s_out=E, m=M, m_is_zero=m_is_zero, segments=segments)
        return E, (M, m_is_zero)

    def state_passing(
        self,
        terms: LinearInputs,
        segments: segmentation.Segments,
        E: Tensor,
        M: tuple[Tensor, Tensor],
        s_in: Tensor | None,
        s_out: Tensor | None,
        reverse: bool = False,
        exchange: backend.Exchange | None = None,
    ) -> Tensor:
        given = terms, E, M[0], M[1], s_in, segments, exchange
        return segment_launch.state_passing(*given, reverse=reverse, s_out=s_out)

    def intra_chunk(
        self, terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool
    ) -> None:
        HV, V = terms.v.shape[2:]
        programs = intra.u.shape[0] * HV
        common: dict[str, Any] = {
            **pointers(terms, ("v", "write", "g", "beta")),
            **intra.pointers(),
            **dplr_args(terms),
            "scale": scale,
            "keep": int(for_backward),
            "token_heads": _token_stride(terms.v) // V,
            "CHANNEL": terms.decay == "channel",
            "LIMIT": RANGES[terms.v.dtype].whole,
            "APART": RANGES[terms.v.dtype].apart if terms.g is not None else 0.0,
            # rows have the same bits in both kernels only where the compiler fuses no products and
            # sums, which it would do differently in each
            "enable_fp_fusion": False,
            "num_warps": 4,
        }
        run: Any = cached(wy.dplr_wy_sm90_kernel)[(programs,)]
        run(
            **_rows(terms, 64),
            C=segmentation.CHUNK,
            HAS_GATE=terms.g is not None,
            **common,
            maxnreg=168,  # three programs fit a multiprocessor
        )
        if terms.g is not None:
            most = 2 * sm_count(terms.v.device.index)
            run = cached(intra_safe.dplr_intra_safe_sm90_kernel)[(min(most, programs),)]
            run(**_pointers(terms), total=programs, **common)

    def chunk_fwd(
        self,
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
        segments: segmentation.Segments | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> None:
        """As TritonDplr.chunk_fwd. m_is_zero: with m, where that is not written."""
        make = "ends" if m is not None else "o" if states is None else "states"
        if make != "o":
            intra = intra._replace(q=None, qb=None, qk=None)  # o alone wants these
        q, w, b, k, u, total, qb, qk, *_ = intra
        HV, V, K = *terms.v.shape[2:], terms.q.shape[-1]
        v = None if k is None else terms.v
        two_stages = k is not None and (K == 128 or make != "o")
        columns = 1 + -(-K // V) if make == "ends" else 1
        run: Any = cached(dplr_chunk_fwd_sm90_kernel)[
            (columns * HV * segmentation.num_sequences(terms, segments),)
        ]
        run(
            q_desc=_chunks(q),
            w_desc=_chunks(w),
            b_desc=_chunks(b),
            k_desc=_chunks(k),
            qb_desc=_chunks(qb),
            qk_desc=_chunks(qk),
            v_desc=_row_tiles(v, 64),
            o_desc=_row_tiles(o, 64),
            x_desc=_chunks(x),
            states_desc=_chunks(states),
            o_ptr=o,
            u_ptr=u,
            total_ptr=total,
            m_ptr=m,
            m_is_zero_ptr=m_is_zero,
            w_ptr=None if m is None else w,
            b_ptr=None if m is None else b,
            **_chunk_args(terms, s_in, s_out, segments),
            **(prefix.pointers() if prefix else prefix_states.NO_POINTERS),
            token_heads=HV if o is None else _token_stride(o) // V,
            OUTPUT=make,
            ST=2 if two_stages else 3,
            DELTA=terms.transition == "delta",
        )

    def chunk_dstate(
        self,
        terms: LinearInputs,
        do: Tensor,
        intra: IntraChunk,
        *,
        y: Tensor | None = None,
        dstates: Tensor | None = None,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        segments: segmentation.Segments | None = None,
    ) -> None:
        programs = terms.v.shape[2] * segmentation.num_sequences(terms, segments)
        run: Any = cached(chunk_dstate.dplr_chunk_dstate_sm90_kernel)[(programs,)]
        run(
            do_desc=tma.token_tiles(do, 64),
            q_desc=_chunks(intra.q),
            w_desc=_chunks(intra.w),
            b_desc=_chunks(intra.b),
            qb_desc=_chunks(intra.qb),
            r_desc=_chunks(None if y is None else intra.r),
            y_desc=_chunks(y),
            states_desc=_chunks(dstates),
            total_ptr=intra.total,
            **_chunk_args(terms, s_in, s_out, segments),
            TRANSITION_ONLY=y is None,
            ST=2,
        )

    def score_grads(self, terms: LinearInputs, intra: IntraChunk, made: ChunkGrads) -> None:
        do, scale, states, scores, _, dbeta, grads = made
        aligned = grads["v"].data_ptr() % 16 == 0
        if terms.write is not None or not aligned or not supports_dqkg(terms, do):
            super().score_grads(terms, intra, made)
            return
        HV, V = terms.v.shape[2:]
        K, delta = terms.q.shape[-1], terms.a is None
        x, y, _, dstates = states
        launch: Any = cached(dplr_scores_sm90_kernel)[(x.shape[0] * HV,)]
        launch(
            v_desc=tma.token_tiles(terms.v, V),
            do_desc=tma.token_tiles(do, V),
            x_desc=tma.tma_descriptor(x, segmentation.CHUNK, V, segmentation.CHUNK),
            y_desc=tma.tma_descriptor(y, segmentation.CHUNK, V, segmentation.CHUNK),
            k_desc=_chunks(intra.k),
            qk_desc=_chunks(intra.qk),
            ak_desc=_chunks(None if delta else intra.ak),
            dstates_desc=None if delta else tma.tma_descriptor(dstates, K, V, K),
            dv_desc=tma.token_tiles(grads["v"], V),
            dv_ptr=grads["v"],
            beta_ptr=terms.beta,
            dbeta_ptr=dbeta,
            **scores.pointers(),
            scale=scale,
            K=K,
            V=V,
            C=segmentation.CHUNK,
            DELTA=delta,
            **segmentation.sequence_args(terms),
            num_warps=4,
            maxnreg=168 if delta else 255,  # three or two programs a multiprocessor
        )

    def dqkg(self, terms: LinearInputs, made: ChunkGrads) -> None:
        do, scale, states, scores, strong, dbeta, grads = made
        if not supports_dqkg(terms, do):
            super().dqkg(terms, made)
            return
        assert strong is not None
        (B, T, HV, V), K = terms.v.shape, terms.q.shape[-1]
        chunks = states.x.shape[0]
        common: dict[str, Any] = {
            "v_desc": None if terms.a is None else tma.token_tiles(terms.v, V),
            "do_desc": tma.token_tiles(do, V),
            "x_desc": tma.tma_descriptor(states.x, segmentation.CHUNK, V, segmentation.CHUNK),
            "y_desc": tma.tma_descriptor(states.y, segmentation.CHUNK, V, segmentation.CHUNK),
            "states_desc": tma.tma_descriptor(states.states, K, V, segmentation.TMA_COLUMNS),
            "dstates_desc": tma.tma_descriptor(states.dstates, K, V, segmentation.TMA_COLUMNS),
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
            "scale": scale,
            "tokens": B * T,
            "BK": segmentation.TMA_COLUMNS,
            "C": segmentation.CHUNK,
            **dplr_args(terms),
        }
        sms, total = sm_count(do.device.index), chunks * HV
        # the chunks whose quarters allow it, and then the others
        launch: Any = cached(dplr_dqkg_sm90_kernel)[(min(sms, total),)]
        launch(
            **_rows(terms, segmentation.TMA_COLUMNS),
            g_desc=tma.token_tiles(terms.g, segmentation.TMA_COLUMNS),
            total=total,
            NK=1 if dbeta is None else dbeta.shape[0] - 1,
            WIDE=2,  # warps beside each other, each four rows of them
            **common,
            num_warps=8,
            maxnreg=168,  # of 12 warps: what all partitions share
        )
        total *= K // segmentation.TMA_COLUMNS
        # strong chunks, which most calls do not have: eight a program
        launch = cached(intra_safe_bwd.dplr_intra_safe_bwd_sm90_kernel)[
            (min(total, max(sms, total // 8)),)
        ]
        launch(
            total=total,
            **_pointers(terms),
            g_ptr=terms.g,
            LIMIT=RANGES[terms.v.dtype].whole,
            SHIFT=RANGES[terms.v.dtype].shift,
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


def _chunk_args(
    terms: LinearInputs,
    s_in: Tensor | None,
    s_out: Tensor | None,
    segments: segmentation.Segments | None,
) -> dict[str, Any]:
    """Of both kernels that go from chunk to chunk."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    # of 8 and 12 warps: what all partitions share
    sizes = {
        "K": K,
        "V": V,
        "C": segmentation.CHUNK,
        "num_warps": 4,
        "maxnreg": 128 if V == 64 else 168,
    }
    return sizes | segmentation.scan_args(terms, segments, s_in, s_out)


def _rows(terms: LinearInputs, columns: int) -> dict[str, Any]:
    """Descriptors of q, k, a and b as rows of all heads, in tiles [CHUNK, columns]; what erases by
    gates of channels is read as b."""
    made = {f"{n}_desc": _row_tiles(getattr(terms, n), columns) for n in "qkab"}
    if terms.erase is not None:
        made["b_desc"] = _row_tiles(terms.erase, columns)
    return made


def _pointers(terms: LinearInputs) -> dict[str, Tensor | None]:
    """As _rows."""
    given = pointers(terms, "qkab")
    return given if terms.erase is None else given | {"b_ptr": terms.erase}


def _row_tiles(x: Tensor | None, columns: int) -> Any:
    """token_tiles of x, which may be a part of the heads."""
    return None if x is None else tma.token_tiles(x, columns, _token_stride(x))


def _token_stride(x: Tensor) -> int:
    """Elements from one token to the next; x is dense, or a part of the heads of such a tensor."""
    B, T, heads, channels = x.shape
    return x.stride(1) if T > 1 else x.stride(0) if B > 1 else heads * channels


def _chunks(x: Tensor | None) -> Any:
    """A descriptor of a tensor of chunks [..., CHUNK or more rows, columns], CHUNK rows a tile."""
    return (
        None if x is None else tma.tma_descriptor(x, x.shape[-1], segmentation.CHUNK, x.shape[-1])
    )


BACKEND = Sm90Dplr()
forward, backward = BACKEND.forward, BACKEND.backward
