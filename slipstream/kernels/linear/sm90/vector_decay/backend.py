"""The stages of a decay per channel on sm_90 (kernels/linear/vector_decay.py has their order):
forward is one scan in Gluon, which makes what chunks are without the state itself and leaves
nothing but o and the final state; of few heads and long sequences segments are scanned at once,
with a state a segment. Backward is Triton's. Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import prefix_states, vector_decay
from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import LinearInputs, as_fp32
from slipstream.kernels.linear.sm90.common import align16, align_for_tma, token_tiles
from slipstream.kernels.linear.sm90.vector_decay import chunk_fwd
from slipstream.kernels.linear.triton.vector_decay import backend as triton
from slipstream.kernels.linear.vector_decay import IntraChunk, VectorDecayProblem
from slipstream.runtime.launch_cache import cached


class Sm90VectorDecay(triton.TritonVectorDecay):
    """Of forward alone."""

    def unit(self, terms: LinearInputs) -> None:
        """Ranks exchange states in forward alone."""

    def choose_segments(self, terms: LinearInputs, unit: int) -> segmentation.Segments | None:
        return segmentation.vector_decay_sm90(terms)

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

    def intra_chunk(
        self,
        problem: VectorDecayProblem,
        memory: Tensor | None = None,
        fine: bool = False,
        p: Tensor | None = None,
    ) -> IntraChunk:
        """The inputs."""
        return IntraChunk(problem.q, problem.k, None, None)

    def chunk_scan(
        self, chunks: vector_decay.ChunkLaunch, problem: VectorDecayProblem, intra: IntraChunk
    ) -> None:
        q, g, terms, reads_q = problem.q, problem.g, problem.terms, chunks.y is not None
        assert q is not None
        segments, K, X = problem.segments, q.shape[-1], chunks.x.shape[-1]
        programs = terms.v.shape[2] * segmentation.num_sequences(terms, segments)
        scan = segmentation.scan_args(terms, segments, chunks.s_in, chunks.s_out)
        del scan["HAS_GATE"]
        launch: Any = cached(chunk_fwd.vector_decay_chunk_fwd_sm90_kernel)[(programs,)]
        launch(
            **scan,
            q_desc=token_tiles(q, K) if reads_q else None,
            k_desc=token_tiles(problem.k, K),
            x_desc=token_tiles(chunks.x, segmentation.TMA_COLUMNS),
            g_desc=token_tiles(g, K),
            y_desc=token_tiles(chunks.y, segmentation.TMA_COLUMNS),
            y_ptr=chunks.y,
            u_ptr=terms.u if reads_q else None,
            total_ptr=chunks.total,
            **(chunks.prefix.pointers() if chunks.prefix else prefix_states.NO_POINTERS),
            scale=chunks.scale,
            scale_in=chunks.scale_in,
            scale_out=chunks.scale_out,
            H=q.shape[2],
            K=K,
            X=X,
            C=segmentation.CHUNK,
            ST=2 if reads_q else 3,
            LEVELS=segmentation.CHUNK.bit_length() - 1,
            BOUND=triton.RANGES[q.dtype].bound,
            SHIFT=triton.RANGES[q.dtype].shift,
            HAS_U=reads_q and terms.u is not None,
            num_warps=4,
            maxnreg=128,  # of 16 warps: what all parts of a program share
        )


BACKEND = Sm90VectorDecay()
forward, backward = BACKEND.forward, triton.backward
