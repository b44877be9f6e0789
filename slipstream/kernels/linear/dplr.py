"""Per-channel decay, and free a and b, in chunks: the order of the stages, for every back end.

    intra_chunk    what needs no state: decayed q and k, WY factors, scores (IntraChunk). Chunks
                   that decay strongly are computed again; programs of other chunks end at once
    chunk_fwd      carries the state from chunk to chunk, and writes o
    chunk_dstate   carries its gradient from the last chunk to the first
    score_grads    gradients of the chunk's scores, and of v
    dqkg           all other gradients, of all chunks at once

Forward saves nothing. Backward runs intra_chunk again, then chunk_fwd, which writes x, what each
token reads of the state, and the states before chunks. Few heads of long sequences are cut into
segments. Nothing here waits for the device, or depends on values there.

Memory beyond results, in tensors of the size of v at K = V:

    forward     5.5 for the delta rule, 7 for free a and b
    backward    8 and 10; with grouped heads also the gradients of q, k, a and b for each value head
    segments    two states of each

On sm_90 KDA's forward is one kernel where segments.py says so, and has no such memory.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, inputs, prefix_states, segments
from slipstream.kernels.linear.inputs import ChunkBackend, Cotangents, LinearInputs, as_fp32
from slipstream.runtime.backends import device_of


class IntraChunk(NamedTuple):
    """What a chunk is without the state before it, by the names of wy.py."""

    q: Tensor
    w: Tensor
    b: Tensor
    k: Tensor | None
    u: Tensor
    total: Tensor | None
    qb: Tensor
    qk: Tensor | None
    ak: Tensor | None
    r: Tensor | None
    strong: Tensor | None

    def pointers(self) -> dict[str, Tensor | None]:
        """Arguments of the kernels that write it."""
        written = {f"{name}_out_ptr": x for name, x in zip("qwbku", self)}
        return written | {f"{name}_ptr": x for name, x in zip(self._fields[5:], self[5:])}


class ChunkStates(NamedTuple):
    """Inputs of the gradients of all chunks, by the names of chunk.py."""

    x: Tensor
    y: Tensor
    states: Tensor
    dstates: Tensor


class ScoreGrads(NamedTuple):
    """Gradients of the scores [chunks, HV, C, C], those of free a and b alone None; and those of
    pairs of a token with itself, of qb and qk."""

    qb: Tensor
    ab: Tensor | None
    qk: Tensor | None
    ak: Tensor | None
    diagonal: Tensor

    def pointers(self) -> dict[str, Tensor | None]:
        """Arguments of the kernels."""
        squares = {f"d{name}_ptr": x for name, x in zip(self._fields[:-1], self[:-1])}
        return squares | {"diag_ptr": self.diagonal}


class ChunkGrads(NamedTuple):
    """Inputs and results of the stages for the gradients of chunks.

    Attributes:
        strong: which chunks are computed again, in sub-chunks [chunks, HV].
        dbeta: shares of beta's gradient [shares + 1, B, T, HV].
        grads: by name, those of q, k, a, b and g [B, T, HV, K], of v and write.
    """

    do: Tensor
    scale: float
    states: ChunkStates
    scores: ScoreGrads
    strong: Tensor | None
    dbeta: Tensor | None
    grads: dict[str, Tensor]


class DplrBackend(ChunkBackend):
    @abstractmethod
    def padded_width(self, terms: LinearInputs) -> int:
        """Channels of K that a tile has."""

    @abstractmethod
    def beta_shares(self, terms: LinearInputs) -> int:
        """Programs of dqkg that add to the gradient of a token's beta."""

    @abstractmethod
    def intra_chunk(
        self, terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool
    ) -> None:
        """intra is written, of strong chunks too."""

    @abstractmethod
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
        segments: segments.Segments | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> None:
        """Writes the tensors that are given: o; or x and the states before each chunk."""

    @abstractmethod
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
        segments: segments.Segments | None = None,
    ) -> None:
        """Writes the tensors that are given: y and dstates; or, of segments, s_out alone."""

    @abstractmethod
    def score_grads(self, terms: LinearInputs, intra: IntraChunk, made: ChunkGrads) -> None:
        """Into scores, the gradients of v and write, and the first share of beta's."""

    @abstractmethod
    def dqkg(self, terms: LinearInputs, made: ChunkGrads) -> None:
        """Into the gradients of q, k, a, b and g, and the other shares of beta's."""

    @abstractmethod
    def choose_segments(self, terms: LinearInputs) -> segments.Segments | None: ...

    @abstractmethod
    def segment_transition(
        self, terms: LinearInputs, intra: IntraChunk, segments: segments.Segments
    ) -> tuple[Tensor, Any]:
        """Each segment's term of the state [count, HV, K, V] and its factor, as state_passing wants
        it."""

    @abstractmethod
    def state_passing(
        self,
        terms: LinearInputs,
        segments: segments.Segments,
        E: Tensor,
        M: Any,
        s_in: Tensor | None,
        s_out: Tensor | None,
        reverse: bool = False,
        exchange: backend.Exchange | None = None,
    ) -> Tensor:
        """The state before each segment, or, reverse, the gradient of that after it; E may be
        overwritten."""

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        names = ("a", "b", "g", "beta", "erase", "write")
        given = {name: x for name in names if (x := getattr(terms, name)) is not None}
        return inputs.contiguous(terms)._replace(
            **{name: x.contiguous() for name, x in given.items()}
        )

    def forward_layout(self, terms: LinearInputs) -> LinearInputs:
        """The same for the kernels of forward."""
        return self.to_kernel_layout(terms)

    def fused_fwd(self, terms: LinearInputs, scale: float, o: Tensor, final: Tensor) -> bool:
        """Writes o and the final states in one kernel and returns True, where there is one for the
        call."""
        return False

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
            terms = as_fp32(terms)
        terms = self.forward_layout(terms)
        o = terms.v.new_empty(terms.v.shape)
        final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
        with device_of(o.device):
            whole = exchange is None and prefix is None
            if whole and self.fused_fwd(terms, scale, o, final):
                return o, final
            intra = self._empty_intra_chunk(terms, for_backward=False)
            self.intra_chunk(terms, scale, intra, for_backward=False)
            segments = self.choose_segments(terms)
            if exchange is not None:
                segments = self.agree(terms, segments, exchange)
            s_in, s_out = terms.initial_state, final
            if segments is not None:
                given = *self.segment_transition(terms, intra, segments), s_in, final
                s_in = self.state_passing(terms, segments, *given, exchange=exchange)
                s_out = None
            ends: dict[str, Any] = {"s_in": s_in, "s_out": s_out, "segments": segments}
            self.chunk_fwd(terms, intra, o=o, prefix=prefix, **ends)
        return o, final

    def gradients(self, terms: LinearInputs, given: Cotangents) -> dict[str, Tensor]:
        do, dfinal, dstate, scale, _, _, exchange = given
        intra = self._empty_intra_chunk(terms, for_backward=True)
        self.intra_chunk(terms, scale, intra, for_backward=True)
        segments = self.choose_segments(terms)
        if exchange is not None:
            segments = self.agree(terms, segments, exchange)
        s_in, ds_in, ds_out = terms.initial_state, dfinal, dstate
        if segments is not None:
            E, M = self.segment_transition(terms, intra, segments)
            s_in = self.state_passing(terms, segments, E, M, terms.initial_state, None)
            dE, ds_out = torch.empty_like(E), None
            self.chunk_dstate(terms, do, intra, s_out=dE, segments=segments)
            passed = terms, segments, dE, M, dfinal, dstate
            ds_in = self.state_passing(*passed, reverse=True, exchange=exchange)
            del E, M, dE, passed
        (chunks, HV, V, C), wide, v = intra.u.shape, intra.q.shape[-1], terms.v
        x, before = v.new_empty(chunks, HV, V, C), v.new_empty(chunks, HV, V, wide)
        self.chunk_fwd(terms, intra, x=x, states=before, s_in=s_in, segments=segments)
        # u is not read again: the next tensors take its memory, and qb holds its place
        intra = intra._replace(u=intra.qb)
        states = ChunkStates(x, torch.empty_like(x), before, torch.empty_like(before))
        ends: dict[str, Any] = {"s_in": ds_in, "s_out": ds_out, "segments": segments}
        self.chunk_dstate(terms, do, intra, y=states.y, dstates=states.dstates, **ends)
        del s_in, ds_in, ends
        intra = intra._replace(q=intra.qb, w=intra.qb, b=intra.qb, r=None)
        made = self._empty_chunk_grads(terms, do, scale, states, intra)
        self.score_grads(terms, intra, made)
        del intra
        grads = made.grads
        grads |= self._empty_grads(terms, do)
        self.dqkg(terms, made)
        for name in (n for n in "qkab" if n in grads):
            grads[name] = inputs.sum_grouped_heads(grads[name], terms.q.shape[2])
        if terms.g is not None and terms.decay != "channel":
            grads["g"] = grads["g"].sum(-1)
        if made.dbeta is not None:
            grads["beta"] = made.dbeta.sum(0)
        return grads

    def _empty_intra_chunk(self, terms: LinearInputs, *, for_backward: bool) -> IntraChunk:
        """Memory for what intra_chunk writes."""
        HV, V = terms.v.shape[2:]
        wide, C, v = self.padded_width(terms), self.chunk(terms), terms.v
        delta, gated = terms.transition == "delta", terms.g is not None
        chunks = segments.num_chunks(terms, C)
        size, square = (chunks, HV, C, wide), (chunks, HV, C, C)
        qb = v.new_empty(square)
        # ak and r are not written unless backward wants them
        return IntraChunk(
            q=v.new_empty(size),
            w=v.new_empty(size),
            b=v.new_empty(size),
            k=None if delta else v.new_empty(size),
            u=v.new_empty(chunks, HV, V, C, dtype=torch.float32),
            total=v.new_empty(chunks, HV, wide, dtype=torch.float32) if gated else None,
            qb=qb,
            qk=None if delta else v.new_empty(square),
            ak=None if delta else v.new_empty(square) if for_backward else qb,
            r=v.new_empty(square) if for_backward else qb,
            strong=v.new_empty(chunks, HV, dtype=torch.int32) if gated else None,
        )

    def _empty_chunk_grads(
        self, terms: LinearInputs, do: Tensor, scale: float, states: ChunkStates, intra: IntraChunk
    ) -> ChunkGrads:
        """Memory for what score_grads writes."""
        (B, T, HV), like = terms.v.shape[:3], intra.qb
        free, dbeta = terms.transition != "delta", None
        scores = ScoreGrads(
            torch.empty_like(like),
            torch.empty_like(like),
            torch.empty_like(like) if free else None,
            torch.empty_like(like) if free else None,
            do.new_empty(like.shape[0], HV, 2, like.shape[-1], dtype=torch.float32),
        )
        if terms.beta is not None:
            dbeta = do.new_empty(self.beta_shares(terms) + 1, B, T, HV, dtype=torch.float32)
        names = ("v",) if terms.write is None else ("v", "write")
        grads = {n: do.new_empty(do.shape) for n in names}
        return ChunkGrads(do, scale, states, scores, intra.strong, dbeta, grads)

    def _empty_grads(self, terms: LinearInputs, do: Tensor) -> dict[str, Tensor]:
        """Memory for what dqkg writes: that of g in its dtype where it is of channels."""
        shape = (*terms.v.shape[:3], terms.q.shape[-1])
        names = [n for n in (*"qkab", "erase") if getattr(terms, n) is not None]
        grads = {n: do.new_empty(shape) for n in names}
        if terms.g is not None:
            dtype = terms.g.dtype if terms.decay == "channel" else torch.float32
            grads["g"] = do.new_empty(shape, dtype=dtype)
        return grads


def dplr_args(terms: LinearInputs) -> dict[str, Any]:
    """Arguments of every kernel: sizes and flags."""
    H, K = terms.q.shape[2:]
    sizes = {"H": H, "K": K, "V": terms.v.shape[-1], "DELTA": terms.transition == "delta"}
    return sizes | segments.sequence_args(terms)
