"""A decay per channel without a transition, in chunks: the order of the stages, for every back end.

    intra_chunk     q and k times their decays to the edges of their chunk, and the scores within
                    it, all chunks at once (IntraChunk)
    chunk_scan      carries a state from chunk to chunk, for any of o, dq, dk and dv (ChunkLaunch)
    state_passing   makes the states before segments from what each adds and how far each decays
    chunk_pairs     P = do v^T within chunks
    chunk_grads     what chunks add to the gradients by themselves, and that of the gate

Forward is intra_chunk and one scan, and saves nothing. Backward is intra_chunk again, three scans,
P, and the gradients on the side that decays.

Memory beyond results, with K = V and chunks of 64, where intra_chunk has kernels of its own:
forward 2.5 times k; backward 2.5 times k, less what there is room for where the gradient of the
gate will be. P is half of k, and a state every ANCHOR_INTERVAL chunks a quarter of it in 16 bits;
with grouped heads the gradients of q and k for each value head; for a sequence in segments a state
a segment, once forward and twice backward.

Decay of the columns of the state, gv, is decay of the rows with the roles exchanged: with q, k, v
and do there for do, v, k and q here, dq there is o here, dk is dv, o is dq and dv is dk.

Nothing here waits for the device, nor depends on values there.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, inputs, prefix_states
from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import ChunkBackend, Cotangents, LinearInputs, contiguous
from slipstream.runtime.backends import device_of


class VectorDecayProblem(NamedTuple):
    """A call by the names of the kernels, where K is the side that decays; C: tokens of a chunk."""

    q: Tensor | None  # [B, T, HK, K]; not needed for forward with gv
    k: Tensor  # [B, T, HK, K]
    v: Tensor  # [B, T, HX, V]
    do: Tensor | None  # [B, T, HX, V]
    g: Tensor  # [B, T, HV, K]
    terms: LinearInputs
    C: int
    segments: segmentation.Segments | None

    @property
    def chunks(self) -> int:
        """An upper bound, which needs no lengths."""
        return segmentation.num_chunks(self.terms, self.C)

    def empty_pairs(self, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for P, in the dtype of k if None."""
        return self.k.new_empty(self.chunks, self.g.shape[2], self.C, self.C, dtype=dtype)


class IntraChunk(NamedTuple):
    """By the names of triton/vector_decay/intra_fwd.py."""

    qs: Tensor | None
    ke: Tensor
    a: Tensor | None
    decay: Tensor | None
    rest: Tensor | None = None
    strong: Tensor | None = None


class GateSums(NamedTuple):
    """Results of the scans for dq and dk that dg needs, by the names of chunk.py."""

    sums: Tensor
    z: Tensor
    anchors: Tensor


class ChunkLaunch(NamedTuple):
    """One scan: tensors by the names of triton/vector_decay/chunk.py; y None where only states are
    wanted; rows: for dq or dk; sums: then written."""

    r: Tensor
    w: Tensor
    x: Tensor
    rest: Tensor | None = None
    y: Tensor | None = None
    a: Tensor | None = None
    s_in: Tensor | None = None
    s_out: Tensor | None = None
    total: Tensor | None = None
    other: Tensor | None = None
    scale: float = 1.0
    scale_in: float = 1.0
    scale_out: float = 1.0
    reverse: bool = False
    rows: bool = False
    sums: GateSums | None = None
    prefix: prefix_states.PrefixStates | None = None


class VectorDecayBackend(ChunkBackend):
    scales_states = True
    # of a scan, its segments, and states: what these add becomes the states before them; the scan's
    # s_out is written, if there is one
    state_passing: Callable[[ChunkLaunch, LinearInputs, segmentation.Segments, Tensor], None]

    @abstractmethod
    def tiles_of_columns(self, terms: LinearInputs) -> int:
        """Programs that a head has in a scan."""

    @abstractmethod
    def intra_chunk(
        self,
        problem: VectorDecayProblem,
        memory: Tensor | None = None,
        fine: bool = False,
        p: Tensor | None = None,
    ) -> IntraChunk:
        """Args:
        memory: a tensor that is free until the gradients are written.
        fine: ke in two parts.
        p: memory for P, which is then computed too.
        """
        raise NotImplementedError

    @abstractmethod
    def chunk_scan(
        self, chunks: ChunkLaunch, problem: VectorDecayProblem, intra: IntraChunk
    ) -> None: ...

    @abstractmethod
    def chunk_pairs(self, problem: VectorDecayProblem) -> Tensor: ...

    @abstractmethod
    def chunk_grads(
        self,
        problem: VectorDecayProblem,
        intra: IntraChunk,
        p: Tensor,
        scale: float,
        **named: Tensor | None,
    ) -> None:
        """named: dqs and dke, and what there is of the other tensors of dqkg.py."""

    def unit(self, terms: LinearInputs) -> int | None:
        """Tokens from one anchor of the gate's gradient to the next."""
        return segmentation.ANCHOR_INTERVAL * self.chunk(terms)

    def choose_segments(self, terms: LinearInputs, unit: int) -> segmentation.Segments | None:
        programs = self.tiles_of_columns(terms) * terms.v.shape[2]
        tokens = segmentation.scalar_decay_tokens(terms, programs, self.chunk(terms), unit)
        return segmentation.split_into_segments(terms, tokens)

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        """Everything as the kernels index it, the gate one a channel."""
        g, gv, u = terms.g, terms.gv, terms.u
        if gv is None:
            g = terms.v.new_zeros(terms.v.shape[:3]) if g is None else g
            g = g[..., None] if g.dim() == 3 else g
            g = g.expand(*g.shape[:3], terms.q.shape[-1]).contiguous()
        return contiguous(terms)._replace(
            g=g, gv=None if gv is None else gv.contiguous(), u=None if u is None else u.contiguous()
        )

    def to_input_layout(self, grads: dict[str, Tensor], given: LinearInputs) -> dict[str, Tensor]:
        """Without the gradient of a gate that was not given, and that of one a token summed."""
        if given.g is None:
            grads.pop("g", None)
        elif given.g.dim() == 3:
            grads["g"] = grads["g"].sum(-1)
        return grads

    def _problem(
        self, terms: LinearInputs, do: Tensor | None, exchange: backend.Exchange | None
    ) -> VectorDecayProblem:
        """do: of backward."""
        unit = segmentation.FORWARD_UNIT if do is None else segmentation.ANCHOR_INTERVAL
        segments = self.choose_segments(terms, unit)
        if exchange is not None:
            segments = self.agree(terms, segments, exchange)
        q, k, v, g = terms.q, terms.k, terms.v, terms.g
        if terms.gv is not None:
            q, k, v, g, do = do, v, k, terms.gv, q
        assert g is not None
        return VectorDecayProblem(q, k, v, do, g, terms, self.chunk(terms), segments)

    def forward(
        self,
        terms: LinearInputs,
        scale: float,
        dtype: torch.dtype | None = None,
        save: bool = False,
        exchange: backend.Exchange | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> tuple[Any, ...]:
        terms = self.to_kernel_layout(terms)
        o = terms.v.new_empty(terms.v.shape, dtype=dtype)
        final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
        with device_of(o.device):
            problem = self._problem(terms, None, exchange)
            wide = o.dtype if terms.gv is not None else problem.k.dtype
            p = problem.empty_pairs(wide) if problem.q is None else None
            intra = self.intra_chunk(problem, fine=wide != problem.k.dtype, p=p)
            ke, state = intra.ke, terms.initial_state
            chunks = ChunkLaunch(ke, ke, problem.v, rest=intra.rest, s_in=state, s_out=final)
            if problem.segments is not None:
                chunks = self.entry_states(chunks, problem, intra, exchange)
            if p is None:
                assert intra.qs is not None
                chunks = chunks._replace(r=intra.qs, y=o, a=intra.a, scale=scale, prefix=prefix)
                self.chunk_scan(chunks, problem, intra)
                return o, final
            assert problem.do is not None
            chunks = chunks._replace(r=problem.do, w=problem.v, x=ke, y=o, rows=True)
            self.chunk_scan(chunks, problem, intra)
            self.chunk_grads(problem, intra, p, scale, dqs=o, dq=o)
        return o, final

    def gradients(self, terms: LinearInputs, given: Cotangents) -> dict[str, Tensor]:
        do, dfinal, dstate, scale, _, _, exchange = given
        problem = self._problem(terms, do, exchange)
        v, over_v, g, u = problem.v, problem.do, problem.g, terms.u
        assert over_v is not None
        shape = (*do.shape[:3], terms.q.shape[-1])
        dq, dk = (do.new_empty(shape) for _ in range(2))
        dv, dg = do.new_empty(do.shape), g.new_empty(g.shape)
        dk_here, dv_here = (dk, dv) if terms.gv is None else (dv, dk)
        dqs = dq if terms.gv is None else torch.empty_like(dv)
        du = None if u is None else u.new_empty(problem.chunks, *u.shape, dtype=torch.float32)
        intra = self.intra_chunk(problem, memory=dg)
        qs, ke = intra.qs, intra.ke
        assert qs is not None
        states = ChunkLaunch(qs, ke, v, s_in=terms.initial_state)
        ends: dict[str, Any] = {"s_in": dfinal, "s_out": dstate, "reverse": True}
        dv_chunks = ChunkLaunch(ke, qs, over_v, scale_in=1 / scale, scale_out=scale, **ends)
        if problem.segments is not None:
            states = self.entry_states(states, problem, intra)
            dv_chunks = self.entry_states(dv_chunks, problem, intra, exchange)
        sums = self._empty_gate_sums(problem)
        by_rows: dict[str, Any] = {"rows": True, "sums": sums, "s_out": None}
        dq_chunks = states._replace(r=over_v, w=v, x=ke, y=dqs, other=qs, **by_rows)
        dk_chunks = dv_chunks._replace(r=v, w=over_v, x=qs, y=dk_here, other=ke, **by_rows)
        self.chunk_scan(dq_chunks, problem, intra)
        self.chunk_scan(dk_chunks, problem, intra)
        self.chunk_scan(dv_chunks._replace(y=dv_here, a=intra.a, scale=scale), problem, intra)
        if terms.gv is not None:
            self.chunk_scan(states._replace(y=dq, a=intra.a, scale=scale), problem, intra)
        intra = intra._replace(a=None)  # P takes its memory
        more: dict[str, Any] = {"dq": dq} if terms.gv is None else {}
        more |= {"dqs": dqs, "dke": dk_here, "z": sums.z, "dk": dk_here, "dg": dg, "du": du}
        self.chunk_grads(problem, intra, self.chunk_pairs(problem), scale, **more)
        dq, dk = (inputs.sum_grouped_heads(x, terms.q.shape[2]) for x in (dq, dk))
        grads = {"q": dq, "k": dk, "v": dv, "gv" if terms.g is None else "g": dg}
        if u is not None and du is not None:
            grads["u"] = du.sum(0).to(u.dtype)
        return grads

    def entry_states(
        self,
        chunks: ChunkLaunch,
        problem: VectorDecayProblem,
        intra: IntraChunk,
        exchange: backend.Exchange | None = None,
    ) -> ChunkLaunch:
        """The scan with the states before segments as s_in; writes s_out where there is one."""
        segments, terms = problem.segments, problem.terms
        assert segments is not None
        HV, K = problem.g.shape[2:]
        wide: dict[str, Any] = {"dtype": torch.float32, "device": problem.k.device}
        states = torch.empty(segments.count, *terms.state_shape[1:], **wide)
        total = torch.empty(segments.count, HV, K, **wide)
        ends = ChunkLaunch(*chunks[:4], s_out=states, total=total, reverse=chunks.reverse)
        self.chunk_scan(ends, problem, intra)

        def run(states: Tensor, s_out: Tensor | None) -> None:
            self.state_passing(chunks._replace(s_out=s_out, total=total), terms, segments, states)

        def factors() -> Tensor:
            return total[..., None] if terms.gv is None else total[..., None, :]

        backend.pass_states(run, states, chunks.s_out, terms, segments, factors, exchange)
        return chunks._replace(s_in=states, s_out=None, scale_in=1.0)

    def _empty_gate_sums(self, problem: VectorDecayProblem) -> GateSums:
        (HV, K), V = problem.g.shape[2:], problem.v.shape[-1]
        anchors = segmentation.num_anchors(
            problem.terms, problem.segments, segmentation.ANCHOR_INTERVAL * problem.C
        )
        wide: dict[str, Any] = {"dtype": torch.float32, "device": problem.k.device}
        sums, z = (torch.empty(problem.chunks, HV, K, **wide) for _ in range(2))
        return GateSums(sums, z, torch.empty(anchors, HV, K, V, **wide))
