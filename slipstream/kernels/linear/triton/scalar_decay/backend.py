"""The stages of one gate a token, or none, by Triton kernels (kernels/linear/scalar_decay.py has
their order)."""

import math
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import prefix_states, scalar_decay
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.plan import INTERPRETED
from slipstream.kernels.linear.segments import Segments, num_sequences
from slipstream.kernels.linear.triton.common.state_passing import decay_state_passing
from slipstream.kernels.linear.triton.common.tma import tma_descriptors
from slipstream.kernels.linear.triton.scalar_decay.chunk import (
    scalar_decay_chunk_kernel,
    scalar_decay_dg_kernel,
)
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile, choose, family_of
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached


@cache
def _tile(device: torch.device, D: int, X: int, bytes_each: int) -> tuple[Tile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), D, X, bytes_each)


class TritonScalarDecay(scalar_decay.ScalarDecayBackend):
    state_passing = staticmethod(decay_state_passing)

    def chunk(self, terms: LinearInputs) -> int:
        K, V = terms.q.shape[-1], terms.v.shape[-1]
        return _tile(terms.q.device, K, V, terms.q.element_size())[0].C

    def tiles_of_columns(self, terms: LinearInputs, width: int, columns: int) -> int:
        tile, _ = _tile(terms.q.device, width, columns, terms.q.element_size())
        return -(-columns // tile.BX)

    def chunk_scan(
        self, chunks: scalar_decay.ChunkLaunch, terms: LinearInputs, segments: Segments | None
    ) -> None:
        (r, w, x, y), sums = chunks[:4], chunks.sums
        HV, X, D = terms.v.shape[2], x.shape[-1], r.shape[-1]
        tile, BD = _tile(x.device, D, X, x.element_size())
        rows: list[Any] = [r, w, x, y, chunks.qk if sums else None]
        tiles = None
        if tile.tma and terms.cu_seqlens is None:
            tiles = tma_descriptors(rows, [BD, BD, tile.BX, tile.BX, tile.BX], tile.C)
        rows = tiles or rows
        cached(scalar_decay_chunk_kernel)[-(-X // tile.BX) * HV * num_sequences(terms, segments),](
            **dict(zip(("r_ptr", "w_ptr", "x_ptr", "y_ptr", "qk_ptr"), rows)),
            total_ptr=chunks.total,
            z_ptr=sums.z if sums else None,
            HR=r.shape[2],
            HX=x.shape[2],
            **scalar_decay.chunk_args(chunks, terms, segments),
            **(chunks.prefix.pointers() if chunks.prefix else prefix_states.NO_POINTERS),
            D=D,
            X=X,
            BD=BD,
            BX=tile.BX,
            C=tile.C,
            REVERSE=chunks.reverse,
            TRANSPOSED=chunks.transposed,
            HAS_Y=y is not None,
            GROUPED=terms.q.shape[2] != HV,
            TMA=tiles is not None,
            FP32=x.dtype == torch.float32,
            PRECISION=fp32_dot_precision(),
            num_warps=tile.warps,
            # pointers take more shared memory: two programs then still fit a multiprocessor
            num_stages=min(tile.stages, 2) if tile.tma and tiles is None else tile.stages,
        )

    def gate_gradient(
        self, terms: LinearInputs, sums: scalar_decay.GateSums, segments: Segments | None
    ) -> Tensor:
        assert terms.g is not None
        B, T, HV = terms.g.shape
        dg = torch.empty(B, T, HV, dtype=terms.g.dtype, device=terms.g.device)
        NX, anchors, _ = sums.z.shape
        BH, TOKENS = 8, self.unit(terms)
        cached(scalar_decay_dg_kernel)[-(-HV // BH) * anchors,](
            q_rows_ptr=sums.q_rows,
            k_rows_ptr=sums.k_rows,
            z_ptr=sums.z,
            g_ptr=terms.g,
            dg_ptr=dg,
            cu_ptr=terms.cu_seqlens,
            T=T,
            N=terms.sequences,
            HV=HV,
            tokens=B * T,
            segment=T if segments is None else segments.tokens,
            num_anchors=anchors,
            min_chunk_gate=math.log(torch.finfo(terms.q.dtype).eps / 8),
            **scalar_decay.gate_strides(terms.g),
            NX=NX,
            NK=sums.k_rows.shape[0] // 2,
            TOKENS=TOKENS,
            C=self.chunk(terms),
            BT=min(256, TOKENS),
            BH=BH,
            PACKED=terms.cu_seqlens is not None,
            SPLIT=segments is not None,
            num_warps=4,
        )
        return dg


BACKEND = TritonScalarDecay()
forward, backward = BACKEND.forward, BACKEND.backward
