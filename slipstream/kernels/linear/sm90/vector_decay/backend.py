"""The stages of a decay per channel on sm_90 (kernels/linear/vector_decay.py has their order): the
scans in Gluon, which make what chunks are without the state themselves, and Triton's kernels for P
and for what chunks add by themselves.

Forward is one scan, which leaves nothing but o and the final state; of few heads and long sequences
segments are scanned at once. Where Triton's kernels cut a sequence backward, all kernels are
Triton's. Memory beyond results: forward a state a segment; backward P, half of k, and a state every
ANCHOR_INTERVAL chunks. Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import prefix_states, vector_decay
from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import LinearInputs, as_fp32
from slipstream.kernels.linear.sm90.common import align16, align_for_tma, token_tiles
from slipstream.kernels.linear.sm90.vector_decay import chunk_dqk, chunk_fwd
from slipstream.kernels.linear.triton.vector_decay import backend as triton
from slipstream.kernels.linear.vector_decay import IntraChunk, VectorDecayProblem
from slipstream.runtime.launch_cache import cached

NEGLIGIBLE_LOG2 = 2.0**-10  # what the z of a chunk is not known beyond, as in Triton's chunk.py


class Sm90VectorDecay(triton.TritonVectorDecay):
    def unit(self, terms: LinearInputs) -> None:
        """Ranks exchange states in forward alone."""

    def choose_segments(self, terms: LinearInputs, unit: int) -> segmentation.Segments | None:
        return segmentation.vector_decay_sm90(terms) if unit == segmentation.FORWARD_UNIT else None

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return align_for_tma(super().to_kernel_layout(terms))

    def contiguous(self, x: Tensor) -> Tensor:
        return align16(x.contiguous())

    def forward(
        self, terms: LinearInputs, scale: float, dtype: torch.dtype | None = None, **options: Any
    ) -> tuple[Any, ...]:
        """By Triton's kernels where q, or o, is float32."""
        if torch.float32 in (dtype, terms.q.dtype):
            return triton.forward(as_fp32(terms), scale, **options)
        return super().forward(terms, scale, **options)

    def backward(
        self,
        terms: LinearInputs,
        dout: Tensor | None,
        dfinal: Tensor | None,
        scale: float,
        **options: Any,
    ) -> dict[str, Tensor]:
        """By Triton's kernels where q is float32, ranks exchange states, or those cut sequences."""
        cut = triton.BACKEND.choose_segments(terms, segmentation.ANCHOR_INTERVAL)
        if terms.q.dtype == torch.float32 or options.get("exchange") is not None or cut:
            return triton.backward(terms, dout, dfinal, scale, **options)
        return super().backward(terms, dout, dfinal, scale, **options)

    def intra_chunk(
        self,
        problem: VectorDecayProblem,
        memory: Tensor | None = None,
        fine: bool = False,
        p: Tensor | None = None,
    ) -> IntraChunk:
        """The inputs, and memory for the decays of chunks, which the scans for dq and dk write."""
        k, g, terms, decay = problem.k, problem.g, problem.terms, None
        if problem.do is not None:
            # of slots that no chunk has too, whose part of the gradient of u has to be 0
            make = torch.empty if terms.u is None or terms.cu_seqlens is None else torch.ones
            size = (problem.chunks, *g.shape[2:])
            decay = make(*size, dtype=torch.float32, device=k.device)
        return IntraChunk(problem.q, k, None, decay)

    def chunk_scan(
        self, chunks: vector_decay.ChunkLaunch, problem: VectorDecayProblem, intra: IntraChunk
    ) -> None:
        sums = chunks.sums
        q, g, terms, reads_q = problem.q, problem.g, problem.terms, chunks.y is not None
        assert q is not None
        segments, K, X = problem.segments, q.shape[-1], chunks.x.shape[-1]
        programs = terms.v.shape[2] * segmentation.num_sequences(terms, segments)
        common: dict[str, Any] = segmentation.scan_args(terms, segments, chunks.s_in, chunks.s_out)
        del common["HAS_GATE"]
        common |= {
            "k_desc": token_tiles(problem.k, K),
            "g_desc": token_tiles(g, K),
            "y_desc": token_tiles(chunks.y, segmentation.TMA_COLUMNS),
            "y_ptr": chunks.y,
            "scale_in": chunks.scale_in,
            "H": q.shape[2],
            "K": K,
            "C": segmentation.CHUNK,
            "BOUND": triton.RANGES[q.dtype].bound,
            "REVERSE": chunks.reverse,
            "num_warps": 4,
            "maxnreg": 128,  # of 16 warps: what all parts of a program share
        }
        if chunks.rows:
            assert sums is not None
            V = problem.v.shape[-1]
            for name in ("s_out_ptr", "segment", "HAS_S_OUT", "SPLIT"):
                del common[name]
            launch: Any = cached(chunk_dqk.vector_decay_dqk_sm90_kernel)[(programs,)]
            launch(
                q_desc=token_tiles(q, K),
                v_desc=token_tiles(problem.v, V),
                do_desc=token_tiles(problem.do, V),
                sums_ptr=sums.sums,
                z_ptr=sums.z,
                anchor_ptr=sums.anchors,
                decay_ptr=intra.decay,
                V=V,
                ST=2,
                ANCHOR_INTERVAL=segmentation.ANCHOR_INTERVAL,
                LOST=NEGLIGIBLE_LOG2,
                BEFORE=terms.u is not None,
                **common,
            )
            return
        launch = cached(chunk_fwd.vector_decay_chunk_fwd_sm90_kernel)[(programs,)]
        launch(
            q_desc=token_tiles(q, K) if reads_q else None,
            x_desc=token_tiles(chunks.x, segmentation.TMA_COLUMNS),
            u_ptr=terms.u if reads_q else None,
            total_ptr=chunks.total,
            **(chunks.prefix.pointers() if chunks.prefix else prefix_states.NO_POINTERS),
            scale=chunks.scale,
            scale_out=chunks.scale_out,
            X=X,
            ST=2 if reads_q else 3,
            LEVELS=segmentation.CHUNK.bit_length() - 1,
            SHIFT=triton.RANGES[q.dtype].shift,
            HAS_U=reads_q and terms.u is not None,
            **common,
        )


BACKEND = Sm90VectorDecay()
forward, backward = BACKEND.forward, BACKEND.backward
