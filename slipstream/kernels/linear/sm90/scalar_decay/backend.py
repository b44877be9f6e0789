"""The stages of one gate a token, or none, on sm_90 (kernels/linear/scalar_decay.py has their
order): kernels in the place of Triton's. dk and dv are one where K and V are 128.

They take and leave what Triton's do. Nothing depends on values on the device.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import NO_POINTERS
from slipstream.kernels.linear.scalar_decay import ChunkLaunch, chunk_args, gate_strides
from slipstream.kernels.linear.segments import TMA_COLUMNS, Segments, num_sequences, scanned_sm90
from slipstream.kernels.linear.sm90.common import align16, align_for_tma, token_tiles
from slipstream.kernels.linear.sm90.scalar_decay import chunk_bwd, chunk_fwd, state_scan
from slipstream.kernels.linear.triton.scalar_decay import backend as triton
from slipstream.runtime.launch_cache import cached

WIDE = 256
REGISTERS = 128  # of 16 warps: what all parts of a program share


class Sm90ScalarDecay(triton.TritonScalarDecay):
    def dk_is_whole(self, terms: LinearInputs) -> bool:
        return terms.q.shape[-1] != WIDE

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        """q, k and v as TMA reads them; the gates of a head side by side."""
        g = terms.g
        if g is not None and g.stride(1) > 1:
            g = g.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        return super().to_kernel_layout(align_for_tma(terms)._replace(g=g))

    def contiguous(self, x: Tensor) -> Tensor:
        return align16(x).contiguous()

    def forward(
        self, terms: LinearInputs, scale: float, dtype: torch.dtype | None = None, **options: Any
    ) -> tuple[Any, ...]:
        """By Triton's kernels where o is wanted in float32."""
        run = super().forward
        if torch.float32 in (dtype, terms.q.dtype):
            run = triton.forward
        return run(terms, scale, dtype, **options)

    def states_of_one_scan(
        self, chunks: ChunkLaunch, terms: LinearInputs
    ) -> tuple[ChunkLaunch, Segments | None]:
        segments = None if terms.q.shape[-1] == WIDE else scanned_sm90(terms, terms.v.shape[2])
        if segments is None:
            return chunks, None
        (H, K), (HV, V) = terms.k.shape[2:], terms.v.shape[2:]
        states = terms.k.new_empty(segments.count, HV, K, V, dtype=torch.float32)
        programs = V // TMA_COLUMNS * (K // TMA_COLUMNS) * HV * terms.sequences
        args = segmentation.scan_args(terms, segments, chunks.s_in, chunks.s_out)
        del args["SPLIT"]
        launch: Any = cached(state_scan.scalar_decay_state_scan_sm90_kernel)[(programs,)]
        launch(
            w_desc=token_tiles(terms.k, TMA_COLUMNS),
            x_desc=token_tiles(terms.v, TMA_COLUMNS),
            g_ptr=terms.g,
            states_ptr=states,
            HR=H,
            HX=HV,
            D=K,
            X=V,
            BD=TMA_COLUMNS,
            C=segmentation.CHUNK,
            ST=6,  # of 16 KB
            **gate_strides(terms.g),
            **args,
            num_warps=4,
            maxnreg=REGISTERS,
        )
        return chunks._replace(s_in=states, s_out=None), segments

    def chunk_scan(
        self, chunks: ChunkLaunch, terms: LinearInputs, segments: Segments | None
    ) -> None:
        """By Triton's kernel where the state alone is wanted."""
        (r, w, x, y), sums = chunks[:4], chunks.sums
        if y is None:
            super().chunk_scan(chunks, terms, segments)
            return
        X, D = x.shape[-1], r.shape[-1]
        halves = 1 if D == WIDE else X // TMA_COLUMNS
        programs = X // TMA_COLUMNS // halves * terms.v.shape[2] * num_sequences(terms, segments)
        # both halves of a program would write the same k . dk of later chunks, and the same z
        assert halves == 1 or sums is None or not chunks.reverse
        launch: Any = cached(chunk_fwd.scalar_decay_chunk_fwd_sm90_kernel)[(programs,)]
        launch(
            r_desc=token_tiles(r, D),
            w_desc=token_tiles(w, D),
            x_desc=token_tiles(x, TMA_COLUMNS),
            y_desc=token_tiles(y, TMA_COLUMNS),
            q_desc=token_tiles(chunks.qk if sums else None, TMA_COLUMNS),
            y_ptr=y,
            z_ptr=sums.z if sums and chunks.reverse else None,
            HR=r.shape[2],
            HX=x.shape[2],
            **chunk_args(chunks, terms, segments),
            **(chunks.prefix.pointers() if chunks.prefix else NO_POINTERS),
            D=D,
            X=X,
            C=segmentation.CHUNK,
            ST=2 if D == WIDE else 3,
            HALVES=halves,
            REVERSE=chunks.reverse,
            TRANSPOSED=chunks.transposed,
            num_warps=8 if D == WIDE else 4,
            maxnreg=REGISTERS,
        )

    def dkv_scan(
        self, dk: ChunkLaunch, dv: ChunkLaunch, terms: LinearInputs, segments: Segments | None
    ) -> None:
        (k, q, do, y), sums = dv[:4], dk.sums
        K, V = k.shape[-1], do.shape[-1]
        if K == WIDE:
            super().dkv_scan(dk, dv, terms, segments)
            return
        programs = terms.v.shape[2] * num_sequences(terms, segments)
        launch: Any = cached(chunk_bwd.scalar_decay_chunk_bwd_sm90_kernel)[(programs,)]
        launch(
            q_desc=token_tiles(q, K),
            k_desc=token_tiles(k, K),
            v_desc=token_tiles(dk.r, TMA_COLUMNS),
            do_desc=token_tiles(do, TMA_COLUMNS),
            dk_desc=token_tiles(dk.y, K),
            dv_desc=token_tiles(y, TMA_COLUMNS),
            dk_ptr=dk.y,
            dv_ptr=y,
            z_ptr=sums.z if sums else None,
            H=k.shape[2],
            **chunk_args(dv._replace(sums=sums), terms, segments),
            K=K,
            V=V,
            C=segmentation.CHUNK,
            ST=2,
            num_warps=4,
            maxnreg=REGISTERS,
        )


BACKEND = Sm90ScalarDecay()
forward, backward = BACKEND.forward, BACKEND.backward
