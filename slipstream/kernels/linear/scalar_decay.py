"""No transition, one gate a token or none, in chunks: the order of the stages, for every back end.

    chunk_scan      carries a state from chunk to chunk, for any of o, dq, dk and dv: each is a
                    ChunkLaunch, the same recurrence of other tensors, backward in reversed time
    state_passing   makes the states before segments from what each adds and how far each decays
    gate_gradient   makes dg from the sums that the scans for dq and dk leave (GateSums)

Forward is one scan, and saves nothing. Backward is three, of which that for dq carries forward's
state once more. A sequence in segments is scanned without outputs first, once forward and twice
backward.

Memory beyond results: with grouped heads the gradients of q and k for each value head; for a gate's
gradient, float32, one number a token, head and tile, and a state every ANCHOR_INTERVAL chunks; a
state a segment for each scan without outputs.

Nothing here waits for the device, nor depends on values there.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, inputs, prefix_states
from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import ChunkBackend, LinearInputs, sum_grouped_heads
from slipstream.runtime.backends import device_of


class GateSums(NamedTuple):
    """Results of the scans for dq and dk that dg needs, by the names of chunk.py."""

    q_rows: Tensor
    k_rows: Tensor
    z: Tensor
    anchors: Tensor


class ChunkLaunch(NamedTuple):
    """One scan: tensors by the names of triton/scalar_decay/chunk.py.

    Attributes:
        y: None where only the state is wanted.
        sums: with transposed, what the gate's gradient is made from, written.
        qk: with sums, q or k, whose products with y those are.
    """

    r: Tensor
    w: Tensor
    x: Tensor
    y: Tensor | None
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    total: Tensor | None = None
    scale: float = 1.0
    scale_in: float = 1.0
    scale_out: float = 1.0
    reverse: bool = False
    transposed: bool = False
    sums: GateSums | None = None
    qk: Tensor | None = None
    prefix: prefix_states.PrefixStates | None = None


class ScalarDecayBackend(ChunkBackend):
    scales_states = True
    # of a scan, its segments, and states: what these add becomes the states before them; the scan's
    # s_out is written, if there is one
    state_passing: Callable[[ChunkLaunch, LinearInputs, segmentation.Segments, Tensor], None]

    @abstractmethod
    def chunk_scan(
        self, chunks: ChunkLaunch, terms: LinearInputs, segments: segmentation.Segments | None
    ) -> None: ...

    @abstractmethod
    def gate_gradient(
        self, terms: LinearInputs, sums: GateSums, segments: segmentation.Segments | None
    ) -> Tensor: ...

    @abstractmethod
    def tiles_of_columns(self, terms: LinearInputs, width: int, columns: int) -> int:
        """Programs that a head has in a scan whose state has so many rows and columns."""

    def dk_is_whole(self, terms: LinearInputs) -> bool:
        """Whether one program makes all of dk, rather than one a tile of K."""
        return False

    def states_of_one_scan(
        self, chunks: ChunkLaunch, terms: LinearInputs
    ) -> tuple[ChunkLaunch, segmentation.Segments | None]:
        """With consistent=True: chunks cut into segments, where there is a kernel for the states
        that a scan of whole sequences has before them; s_out is then written."""
        return chunks, None

    def unit(self, terms: LinearInputs) -> int:
        """Tokens from one anchor of the gate's gradient to the next."""
        return segmentation.ANCHOR_INTERVAL * self.chunk(terms)

    def choose_segments(self, terms: LinearInputs, unit: int) -> segmentation.Segments | None:
        HV, V = terms.v.shape[2:]
        programs = self.tiles_of_columns(terms, terms.q.shape[-1], V) * HV
        tokens = segmentation.scalar_decay_tokens(terms, programs, self.chunk(terms), unit)
        return segmentation.split_into_segments(terms, tokens)

    def forward(
        self,
        terms: LinearInputs,
        scale: float,
        dtype: torch.dtype | None = None,
        save: bool = False,
        exchange: backend.Exchange | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> tuple[Any, ...]:
        if dtype is not None:
            terms = inputs.as_fp32(terms)
        terms = self.to_kernel_layout(terms)
        o = terms.v.new_empty(terms.v.shape)
        final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
        with device_of(o.device):
            chunks = ChunkLaunch(
                terms.q, terms.k, terms.v, o, terms.initial_state, final, scale=scale
            )
            segments = self.choose_segments(terms, segmentation.FORWARD_UNIT)
            if exchange is not None:
                segments = self.agree(terms, segments, exchange)
            if segments is not None:
                chunks = self.entry_states(chunks, terms, segments, exchange)
            else:
                chunks, segments = self.states_of_one_scan(chunks, terms)
            self.chunk_scan(chunks._replace(prefix=prefix), terms, segments)
        return o, final

    def gradients(self, terms: LinearInputs, given: inputs.Cotangents) -> dict[str, Tensor]:
        do, dfinal, dstate, scale, gate_gradient, _, exchange = given
        q, k, v = terms.q, terms.k, terms.v
        H, wide = q.shape[2], (*v.shape[:3], q.shape[3])
        dq, dk, dv = q.new_empty(wide), q.new_empty(wide), v.new_empty(v.shape)
        segments = self.choose_segments(terms, segmentation.ANCHOR_INTERVAL)
        if exchange is not None:
            segments = self.agree(terms, segments, exchange)
        sums = None
        if gate_gradient and terms.g is not None:
            sums = self._empty_gate_sums(terms, segments)
        states = ChunkLaunch(q, k, v, None, s_in=terms.initial_state, scale=scale)
        scales: dict[str, Any] = {"scale": scale, "scale_in": 1 / scale, "scale_out": scale}
        dv_chunks = ChunkLaunch(k, q, do, dv, dfinal, dstate, reverse=True, **scales)
        if segments is not None:
            states = self.entry_states(states, terms, segments)
            dv_chunks = self.entry_states(dv_chunks, terms, segments, exchange)
        by_rows: dict[str, Any] = {"transposed": True, "sums": sums}
        self.chunk_scan(states._replace(r=do, w=v, x=k, y=dq, qk=q, **by_rows), terms, segments)
        dk_chunks = dv_chunks._replace(r=v, w=do, x=q, y=dk, qk=k, s_out=None, **by_rows)
        self.dkv_scan(dk_chunks, dv_chunks, terms, segments)
        grads = {"q": sum_grouped_heads(dq, H), "k": sum_grouped_heads(dk, H), "v": dv}
        if sums is not None:
            grads["g"] = self.gate_gradient(terms, sums, segments)
        return grads

    def dkv_scan(
        self,
        dk: ChunkLaunch,
        dv: ChunkLaunch,
        terms: LinearInputs,
        segments: segmentation.Segments | None,
    ) -> None:
        self.chunk_scan(dk, terms, segments)
        self.chunk_scan(dv, terms, segments)

    def entry_states(
        self,
        chunks: ChunkLaunch,
        terms: LinearInputs,
        segments: segmentation.Segments,
        exchange: backend.Exchange | None = None,
    ) -> ChunkLaunch:
        """The scan with the states before segments as s_in; writes s_out where there is one."""
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
        states = torch.empty(segments.count, HV, K, V, **wide)
        total = torch.empty(segments.count, HV, **wide) if terms.g is not None else None
        ends = ChunkLaunch(*chunks[:3], None, s_out=states, total=total, reverse=chunks.reverse)
        self.chunk_scan(ends, terms, segments)

        def run(states: Tensor, s_out: Tensor | None) -> None:
            self.state_passing(chunks._replace(s_out=s_out, total=total), terms, segments, states)

        def transition() -> Tensor | None:
            return None if total is None else total.exp2()[..., None, None]

        backend.pass_states(run, states, chunks.s_out, terms, segments, transition, exchange)
        return chunks._replace(s_in=states, s_out=None, scale_in=1.0)

    def _empty_gate_sums(
        self, terms: LinearInputs, segments: segmentation.Segments | None
    ) -> GateSums:
        (B, T, HV, V), K = terms.v.shape, terms.q.shape[-1]
        NX = self.tiles_of_columns(terms, V, K)
        anchors = segmentation.num_anchors(terms, segments, self.unit(terms))
        wide: dict[str, Any] = {"dtype": torch.float32, "device": terms.q.device}
        return GateSums(
            q_rows=torch.empty(NX, HV, B * T, **wide),
            k_rows=torch.empty(2 if self.dk_is_whole(terms) else 2 * NX, HV, B * T, **wide),
            z=torch.empty(NX, anchors, HV, **wide),
            anchors=torch.empty(anchors, HV, V, K, **wide),
        )


def chunk_args(
    chunks: ChunkLaunch, terms: LinearInputs, segments: segmentation.Segments | None
) -> dict[str, Any]:
    """Arguments of every kernel that goes from chunk to chunk."""
    (B, T), sums, rows = terms.v.shape[:2], chunks.sums, None
    if sums is not None:
        rows = sums.k_rows if chunks.reverse else sums.q_rows
    return {
        "g_ptr": terms.g,
        "rows_ptr": rows,
        "anchor_ptr": sums.anchors if sums else None,
        "num_anchors": sums.z.shape[1] if sums else 0,
        "scale": chunks.scale,
        "scale_in": chunks.scale_in,
        "scale_out": chunks.scale_out,
        "tokens": B * T,
        "ANCHOR_INTERVAL": segmentation.ANCHOR_INTERVAL,
        "HAS_DG": sums is not None,
        **gate_strides(terms.g),
        **segmentation.scan_args(terms, segments, chunks.s_in, chunks.s_out),
    }


def gate_strides(g: Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if g is None else g.stride()
    return dict(zip(("stride_gb", "stride_gt", "stride_gh"), strides))
