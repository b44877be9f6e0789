"""No transition, one gate a token or none, in chunks by Triton kernels; sm_90's replace some.

One kernel (chunk.py) carries a state from chunk to chunk for any of o, dq, dk and dv: each is a
ChunkLaunch, the same recurrence of other tensors, backward in reversed time. Memory beyond results:
with grouped heads the gradients of q and k for each value head; for a gate's gradient, float32, one
number a token, head and tile, and a state every ANCHOR_INTERVAL chunks; for a sequence in segments
a state a segment, once forward and twice backward.

Nothing here waits for the device, nor depends on values there.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import (
    BackendCapabilities,
    Exchange,
    pass_states,
    scaled,
    unscaled,
)
from slipstream.kernels.linear.inputs import LinearInputs, contiguous, sum_grouped_heads
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import (
    ANCHOR_INTERVAL,
    FORWARD_UNIT,
    Segments,
    num_sequences,
    scalar_decay_tokens,
    split_into_segments,
)
from slipstream.kernels.linear.triton.common.decay_state_passing import decay_state_passing
from slipstream.kernels.linear.triton.common.tma import tma_descriptors
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.kernels.linear.triton.scalar_decay.chunk import scalar_decay_chunk_kernel
from slipstream.kernels.linear.triton.scalar_decay.dg import scalar_decay_dg_kernel
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile, choose, family_of
from slipstream.runtime.backends import device_of, fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached

# the gate's gradient takes a third of the backward's time
CAPABILITIES = BackendCapabilities(skips_gate_grad=True, exchanges=True)


class ChunkLaunch(NamedTuple):
    """One launch: tensors by the names of chunk.py; y None where only the state is wanted."""

    r: Tensor
    w: Tensor
    x: Tensor
    y: Tensor | None
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    total: Tensor | None = None
    scale_in: float = 1.0
    scale_out: float = 1.0
    reverse: bool = False
    transposed: bool = False
    prefix: PrefixStates | None = None


class GateSums(NamedTuple):
    """Results of the launches for dq and dk that dg needs, by the names of chunk.py."""

    q_rows: Tensor
    k_rows: Tensor
    z: Tensor
    anchors: Tensor


@cache
def _tile(device: torch.device, D: int, X: int, bytes_each: int) -> tuple[Tile, int]:
    return choose("interpreter" if INTERPRETED else family_of(device), D, X, bytes_each)


def _tile_of(terms: LinearInputs) -> tuple[Tile, int]:
    """That of o; C is that of all."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size())


class TritonScalarDecay:
    """The order of the launches, and Triton's kernels for each."""

    @staticmethod
    def dk_is_whole(terms: LinearInputs) -> bool:
        """Whether one program makes all of dk, rather than one a tile of K."""
        return False

    def segments_of_equal_bits(self, terms: LinearInputs) -> Segments | None:
        """The segments of consistent=True, if there is a kernel for states_before."""
        return None

    def states_before(
        self, chunks: ChunkLaunch, terms: LinearInputs, segments: Segments
    ) -> ChunkLaunch:
        """As _entry_states, by the sums that a scan of whole sequences makes; s_out is written."""
        raise NotImplementedError

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return contiguous(terms)

    def forward(
        self,
        terms: LinearInputs,
        scale: float,
        exchange: Exchange | None = None,
        prefix: PrefixStates | None = None,
    ) -> tuple[Tensor, Tensor]:
        """o [B, T, HV, V] in q's dtype and the final state [N, HV, K, V], float32.

        Args:
            prefix: states to leave on the way.
        """
        terms = self.to_kernel_layout(terms)
        o = terms.v.new_empty(terms.v.shape)
        final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
        chunks = ChunkLaunch(terms.q, terms.k, terms.v, o, s_in=terms.initial_state, s_out=final)
        with device_of(o.device):
            segments = _choose_segments(terms, exchange, FORWARD_UNIT)
            if segments is not None:
                chunks = _entry_states(chunks, terms, segments, exchange)._replace(s_out=None)
            elif (segments := self.segments_of_equal_bits(terms)) is not None:
                chunks = self.states_before(chunks, terms, segments)
            self.launch_chunks(chunks._replace(prefix=prefix), terms, scale, segments)
        return o, final

    def backward(
        self,
        terms: LinearInputs,
        dout: Tensor | None,
        dfinal: Tensor | None,
        scale: float,
        gate_gradient: bool = True,
        exchange: Exchange | None = None,
    ) -> dict[str, Tensor]:
        """Gradients by the name of the term, in its shape and dtype; dg only with gate_gradient."""
        terms = self.to_kernel_layout(terms)
        q, k, v = terms.q, terms.k, terms.v
        do = torch.zeros_like(v) if dout is None or scale == 0.0 else dout.contiguous()
        scale = scale or 1.0  # o does not depend on q, k, v then, and do is 0
        dfinal = unscaled(None if dfinal is None else dfinal.contiguous(), scale, exchange)
        B, T, H, K = q.shape
        HV = v.shape[2]
        dq, dk = (q.new_empty(B, T, HV, K) for _ in range(2))
        dv, dstate = v.new_empty(v.shape), None
        if terms.initial_state is not None:
            dstate = terms.initial_state.new_empty(terms.state_shape)
        scales: dict[str, Any] = {"scale_in": 1 / scale, "scale_out": scale, "reverse": True}
        states = ChunkLaunch(q, k, v, None, s_in=terms.initial_state)
        dv_chunks = ChunkLaunch(k, q, do, dv, s_in=dfinal, s_out=dstate, **scales)
        with device_of(q.device):
            segments = _choose_segments(terms, exchange, ANCHOR_INTERVAL)
            sums = None
            if gate_gradient and terms.g is not None:
                sums = self._empty_gate_sums(terms, segments)
            if segments is not None:
                states = _entry_states(states, terms, segments)
                dv_chunks = _entry_states(dv_chunks, terms, segments, exchange)
                dv_chunks = dv_chunks._replace(s_out=None)
            dq_chunks = states._replace(r=do, w=v, x=k, y=dq, s_out=None, transposed=True)
            self.launch_chunks(dq_chunks, terms, scale, segments, sums, q)
            self.launch_dkv(dv_chunks, dk, v, terms, scale, segments, sums)
            dq, dk = (sum_grouped_heads(x, H) for x in (dq, dk))
            grads = {"q": dq, "k": dk, "v": dv}
            if dstate is not None:
                grads["initial_state"] = scaled(dstate, scale, exchange)
            if sums is not None:
                grads["g"] = _gate_gradient(terms, sums, segments)
        return grads

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
        """dk, and dv, which is what `chunks` writes."""
        dk_chunks = chunks._replace(r=v, w=chunks.x, x=chunks.w, y=dk, s_out=None, transposed=True)
        self.launch_chunks(dk_chunks, terms, scale, segments, sums, chunks.r)
        self.launch_chunks(chunks, terms, scale, segments)

    def _empty_gate_sums(self, terms: LinearInputs, segments: Segments | None) -> GateSums:
        B, T, HV, V = terms.v.shape
        K = terms.q.shape[-1]
        tile, _ = _tile(terms.q.device, V, K, terms.q.element_size())
        NX = -(-K // tile.BX)
        interval = _anchor_tokens(terms)
        if segments is not None:
            anchors = segments.count * -(-segments.tokens // interval)
        elif terms.cu_seqlens is None:
            anchors = B * -(-T // interval)
        else:
            anchors = T // interval + terms.sequences
        wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
        return GateSums(
            q_rows=torch.empty(NX, HV, B * T, **wide),
            k_rows=torch.empty(2 if self.dk_is_whole(terms) else 2 * NX, HV, B * T, **wide),
            z=torch.empty(NX, anchors, HV, **wide),
            anchors=torch.empty(anchors, HV, V, K, **wide),
        )

    @staticmethod
    def launch_chunks(
        chunks: ChunkLaunch,
        terms: LinearInputs,
        scale: float,
        segments: Segments | None = None,
        sums: GateSums | None = None,
        qk: Tensor | None = None,
    ) -> None:
        """
        Args:
            sums: with transposed, what the gate's gradient is made from, written.
            qk: with sums, q or k, whose products with y those are.
        """
        r, w, x, y = chunks[:4]
        HV, X, D = terms.v.shape[2], x.shape[-1], r.shape[-1]
        g, cu = terms.g, terms.cu_seqlens
        tile, BD = _tile(x.device, D, X, x.element_size())
        rows: list[Any] = [r, w, x, y, qk if sums else None]
        tiles = None
        if tile.tma and cu is None:
            tiles = tma_descriptors(rows, [BD, BD, tile.BX, tile.BX, tile.BX], tile.C)
        rows = tiles or rows
        cached(scalar_decay_chunk_kernel)[-(-X // tile.BX) * HV * num_sequences(terms, segments),](
            r_ptr=rows[0],
            w_ptr=rows[1],
            x_ptr=rows[2],
            y_ptr=rows[3],
            total_ptr=chunks.total,
            qk_ptr=rows[4],
            rows_ptr=(sums.k_rows if chunks.reverse else sums.q_rows) if sums else None,
            z_ptr=sums.z if sums else None,
            anchor_ptr=sums.anchors if sums else None,
            HR=r.shape[2],
            HX=x.shape[2],
            num_anchors=sums.z.shape[1] if sums else 0,
            **common_args(chunks, terms, scale, segments),
            **(chunks.prefix.pointers() if chunks.prefix else NO_POINTERS),
            D=D,
            X=X,
            BD=BD,
            BX=tile.BX,
            C=tile.C,
            ANCHOR_INTERVAL=ANCHOR_INTERVAL,
            REVERSE=chunks.reverse,
            TRANSPOSED=chunks.transposed,
            HAS_Y=y is not None,
            HAS_GATE=g is not None,
            HAS_DG=sums is not None,
            HAS_S_IN=chunks.s_in is not None,
            HAS_S_OUT=chunks.s_out is not None,
            SPLIT=segments is not None,
            PACKED=cu is not None,
            GROUPED=terms.q.shape[2] != HV,
            TMA=tiles is not None,
            FP32=x.dtype == torch.float32,
            PRECISION=fp32_dot_precision(),
            num_warps=tile.warps,
            # pointers take more shared memory: two programs then still fit a multiprocessor
            num_stages=min(tile.stages, 2) if tile.tma and tiles is None else tile.stages,
        )


def common_args(
    chunks: ChunkLaunch, terms: LinearInputs, scale: float, segments: Segments | None
) -> dict[str, Any]:
    """Arguments of every kernel that goes from chunk to chunk."""
    B, T, HV, _ = terms.v.shape
    return {
        "g_ptr": terms.g,
        "s_in_ptr": chunks.s_in,
        "s_out_ptr": chunks.s_out,
        "cu_ptr": terms.cu_seqlens,
        "scale": scale,
        "scale_in": chunks.scale_in,
        "scale_out": chunks.scale_out,
        "T": T,
        "N": terms.sequences,
        "HV": HV,
        "tokens": B * T,
        "segment": T if segments is None else segments.tokens,
        **gate_strides(terms.g),
    }


def gate_strides(g: Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if g is None else g.stride()
    return dict(zip(("stride_gb", "stride_gt", "stride_gh"), strides))


def _choose_segments(terms: LinearInputs, exchange: Exchange | None, unit: int) -> Segments | None:
    """Decided by shapes alone."""
    HV, V = terms.v.shape[2:]
    tile, _ = _tile_of(terms)
    programs = -(-V // tile.BX) * HV
    segments = split_into_segments(terms, scalar_decay_tokens(terms, programs, tile.C, unit))
    if exchange is None:
        return segments
    return exchange.segments(terms, segments, tile.C, _anchor_tokens(terms))


def _anchor_tokens(terms: LinearInputs) -> int:
    """Tokens from one anchor to the next."""
    return ANCHOR_INTERVAL * _tile_of(terms)[0].C


def _entry_states(
    chunks: ChunkLaunch, terms: LinearInputs, segments: Segments, exchange: Exchange | None = None
) -> ChunkLaunch:
    """The launch with the states before segments as s_in; writes s_out where there is one."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    HV = terms.v.shape[2]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
    states = torch.empty(segments.count, HV, K, V, **wide)
    total = torch.empty(segments.count, HV, **wide) if terms.g is not None else None
    ends = ChunkLaunch(
        chunks.r, chunks.w, chunks.x, None, s_out=states, total=total, reverse=chunks.reverse
    )
    TritonScalarDecay.launch_chunks(ends, terms, 1.0, segments)

    def run(states: Tensor, s_out: Tensor | None) -> None:
        given = chunks._replace(s_out=s_out, total=total)
        decay_state_passing(given, terms, segments, states)

    def transition() -> Tensor | None:
        return None if total is None else total.exp2()[..., None, None]

    pass_states(run, states, chunks.s_out, terms, segments, transition, exchange)
    return chunks._replace(s_in=states, scale_in=1.0)


def _gate_gradient(terms: LinearInputs, sums: GateSums, segments: Segments | None) -> Tensor:
    assert terms.g is not None
    B, T, HV = terms.g.shape
    cu = terms.cu_seqlens
    dg = torch.empty(B, T, HV, dtype=terms.g.dtype, device=terms.g.device)
    NX, anchors, _ = sums.z.shape
    BH, TOKENS = 8, _anchor_tokens(terms)
    cached(scalar_decay_dg_kernel)[-(-HV // BH) * anchors,](
        q_rows_ptr=sums.q_rows,
        k_rows_ptr=sums.k_rows,
        z_ptr=sums.z,
        g_ptr=terms.g,
        dg_ptr=dg,
        cu_ptr=cu,
        T=T,
        N=terms.sequences,
        HV=HV,
        tokens=B * T,
        segment=T if segments is None else segments.tokens,
        num_anchors=anchors,
        min_chunk_gate=math.log(torch.finfo(terms.q.dtype).eps / 8),
        **gate_strides(terms.g),
        NX=NX,
        NK=sums.k_rows.shape[0] // 2,
        TOKENS=TOKENS,
        C=_tile_of(terms)[0].C,
        BT=min(256, TOKENS),
        BH=BH,
        PACKED=cu is not None,
        SPLIT=segments is not None,
        num_warps=4,
    )
    return dg


_BACKEND = TritonScalarDecay()
forward, backward = _BACKEND.forward, _BACKEND.backward
