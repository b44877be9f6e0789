"""Per-channel decay, and free a and b, in chunks by Triton kernels; sm_90's replace some of them.

    intra_chunk    what needs no state: decayed q and k, WY factors, scores (wy.py). Chunks that
                   decay strongly are computed again (wy_quarters.py, intra_safe.py); programs of
                   other chunks end at once
    chunk_fwd      carries the state from chunk to chunk, and writes o
    chunk_dstate   carries its gradient from the last chunk to the first
    scores         gradients of the chunk's scores, and of v
    dqkg           all other gradients, of all chunks at once

Backward runs intra_chunk again, then chunk_fwd, which writes x, what each token reads of the state,
and the states before chunks. Few heads of long sequences are cut into segments. Nothing here waits
for the device, or depends on values there.

Memory beyond results, in tensors of the size of v at K = V:

    forward     5.5 for the delta rule, 7 for free a and b
    backward    8 and 10; with grouped heads also the gradients of q, k, a and b for each value head
    segments    two states of each
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities, Exchange
from slipstream.kernels.linear.inputs import (
    LinearInputs,
    cast_gate_grads,
    contiguous,
    pointers,
    sum_grouped_heads,
)
from slipstream.kernels.linear.prefix_states import PrefixStates
from slipstream.kernels.linear.segments import NUM_SMS, Segments, num_chunks
from slipstream.kernels.linear.triton.common.gate_ones import gate_ones
from slipstream.kernels.linear.triton.common.state_passing import state_passing
from slipstream.kernels.linear.triton.delta.plan import can_pass_states, segments_for_programs
from slipstream.kernels.linear.triton.dplr import launch
from slipstream.kernels.linear.triton.dplr.dqkg import dplr_dqkg_kernel
from slipstream.kernels.linear.triton.dplr.intra_safe import dplr_intra_safe_kernel
from slipstream.kernels.linear.triton.dplr.intra_safe_bwd import dplr_intra_safe_bwd_kernel
from slipstream.kernels.linear.triton.dplr.launch import IntraChunk, launch_options, tile_of
from slipstream.kernels.linear.triton.dplr.scores import dplr_scores_kernel
from slipstream.kernels.linear.triton.dplr.tiles import ANCHORED_TILES, APART, LIMIT, SHIFT
from slipstream.kernels.linear.triton.dplr.wy import dplr_wy_kernel
from slipstream.kernels.linear.triton.dplr.wy_quarters import dplr_wy_quarters_kernel
from slipstream.kernels.linear.triton.plan import INTERPRETED
from slipstream.runtime.backends import device_of, fp32_dot_precision
from slipstream.runtime.launch_cache import cached

# Chunks of a program of wy_quarters.py, which most chunks do not need, and programs that fill any
# GPU.
MAX_CHUNKS = 16
TARGET_PROGRAMS = 4 * NUM_SMS

CAPABILITIES = BackendCapabilities(exchanges=True)


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


class TritonDplr:
    """The order of the stages, and Triton's kernels for each."""

    chunk_fwd = staticmethod(launch.chunk_fwd)
    chunk_dstate = staticmethod(launch.chunk_dstate)

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        """Tensors with the strides that the kernels of both passes assume."""
        names = ("a", "b", "g", "beta", "erase", "write")
        given = {name: x for name in names if (x := getattr(terms, name)) is not None}
        return contiguous(terms)._replace(**{name: x.contiguous() for name, x in given.items()})

    def forward_layout(self, terms: LinearInputs) -> LinearInputs:
        """The same for the kernels of forward."""
        return self.to_kernel_layout(terms)

    def contiguous(self, x: Tensor) -> Tensor:
        """x with the strides that the kernels assume."""
        return x.contiguous()

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
        terms = self.forward_layout(terms)
        o = terms.v.new_empty(terms.v.shape)
        final = terms.v.new_empty(terms.state_shape, dtype=torch.float32)
        with device_of(o.device):
            intra = empty_intra_chunk(terms, for_backward=False)
            self.intra_chunk(terms, scale, intra, for_backward=False)
            ends = self._scan_ends(terms, intra, final, exchange)
            self.chunk_fwd(terms, intra, o=o, prefix=prefix, **ends)
        return o, final

    def _scan_ends(
        self, terms: LinearInputs, intra: IntraChunk, final: Tensor, exchange: Exchange | None
    ) -> dict[str, Any]:
        """Segments, and the states that chunk_fwd begins and ends with, by its arguments' names."""
        segments = self._segments(terms, exchange)
        if segments is None:
            return {"s_in": terms.initial_state, "s_out": final}
        E, M = self.segment_transition(terms, intra, segments)
        given = E, M, terms.initial_state, final
        entry = self.state_passing(terms, segments, *given, exchange=exchange)
        return {"s_in": entry, "segments": segments}

    def backward(
        self,
        terms: LinearInputs,
        dout: Tensor | None,
        dfinal: Tensor | None,
        scale: float,
        exchange: Exchange | None = None,
    ) -> dict[str, Tensor]:
        """Gradients by the name of the term, in its shape and dtype."""
        given, terms = terms, self.to_kernel_layout(terms)
        do = torch.zeros_like(terms.v) if dout is None else self.contiguous(dout)
        dfinal = None if dfinal is None else dfinal.contiguous()
        dstate = None
        if terms.initial_state is not None:
            dstate = terms.initial_state.new_empty(terms.state_shape)
        with device_of(do.device):
            intra = empty_intra_chunk(terms, for_backward=True)
            self.intra_chunk(terms, scale, intra, for_backward=True)
            segments = self._segments(terms, exchange)
            s_in, ds_in, ds_out = terms.initial_state, dfinal, dstate
            if segments is not None:
                E, M = self.segment_transition(terms, intra, segments)
                s_in = self.state_passing(terms, segments, E, M, terms.initial_state, None)
                dE, ds_out = torch.empty_like(E), None
                self.chunk_dstate(terms, do, intra, s_out=dE, segments=segments)
                passed = terms, segments, dE, M, dfinal, dstate
                ds_in = self.state_passing(*passed, reverse=True, exchange=exchange)
                del E, M, dE, passed
            x, before = _empty_states(terms, intra)
            self.chunk_fwd(terms, intra, x=x, states=before, s_in=s_in, segments=segments)
            # u is not read again: the next tensors take its memory, and qb holds its place
            intra = intra._replace(u=intra.qb)
            states = ChunkStates(x, torch.empty_like(x), before, torch.empty_like(before))
            ends: dict[str, Any] = {"s_in": ds_in, "s_out": ds_out, "segments": segments}
            self.chunk_dstate(terms, do, intra, y=states.y, dstates=states.dstates, **ends)
            del s_in, ds_in, ends
            intra = intra._replace(q=intra.qb, w=intra.qb, b=intra.qb, r=None)
            strong = intra.strong
            scores, values, dbeta = self._score_grads(terms, do, intra, states, scale)
            del intra
            grads = self._dqkg(terms, do, states, scores, dbeta, strong, scale) | values
        if dstate is not None:
            grads["initial_state"] = dstate
        return cast_gate_grads(grads, given)

    @staticmethod
    def choose_segments(terms: LinearInputs) -> Segments | None:
        """A program counts as one for 64 columns of V."""
        HV, V = terms.v.shape[2:]
        programs = -(-V // 64) * HV * terms.sequences
        return segments_for_programs(terms, programs, tile_of(terms)[0].C)

    def _segments(self, terms: LinearInputs, exchange: Exchange | None) -> Segments | None:
        segments = self.choose_segments(terms)
        if exchange is None:
            return segments
        C, can_pass = tile_of(terms)[0].C, can_pass_states(terms)
        return exchange.segments(terms, segments, C, can_pass=can_pass)

    def state_passing(
        self,
        terms: LinearInputs,
        segments: Segments,
        E: Tensor,
        M: Any,
        s_in: Tensor | None,
        s_out: Tensor | None,
        reverse: bool = False,
        exchange: Exchange | None = None,
    ) -> Tensor:
        """The state before each segment, or, reverse, the gradient of that after it, where E was;
        M is that of segment_transition."""
        state_passing(terms, segments, E, M, s_in, s_out, reverse, exchange)
        return E

    def segment_transition(
        self, terms: LinearInputs, intra: IntraChunk, segments: Segments
    ) -> tuple[Tensor, Any]:
        """Each segment's term of the state [count, HV, K, V] and its factor [count, HV, K, K]."""
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        E = intra.u.new_empty(segments.count, HV, K, V)
        M = intra.u.new_empty(segments.count, HV, K, K)
        self.chunk_fwd(terms, intra, s_out=E, m=M, segments=segments)
        return E, M

    @staticmethod
    def intra_chunk(
        terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool
    ) -> None:
        """intra is written, of strong chunks too."""
        T, HV, V = terms.v.shape[1:]
        (H, K), dtype = terms.q.shape[2:], terms.v.dtype
        tile, WIDE = tile_of(terms)
        # R is rounded to the inputs' dtype; C = 64 is wgmma's, which is slow with tf32
        # (delta/solve_tril.py)
        inner = fp32_dot_precision()
        if dtype != torch.float32:
            inner = "halves" if tile.C == 64 else "tf32"
        names = ("q", "k", "a", "b", "v", "g", "beta")
        args: dict[str, Any] = {**pointers(terms, names), **intra.pointers()}
        args |= {"cu_ptr": terms.cu_seqlens, "scale": scale, "keep": int(for_backward)}
        args |= {"T": T, "N": terms.sequences, "HV": HV, "H": H}
        options: dict[str, Any] = {
            "K": K,
            "V": V,
            "WIDE": WIDE,
            "STEPS": tile.steps,
            **_gate_options(terms),
        }
        options |= {"INNER": "ieee" if INTERPRETED else inner}
        options |= {"BK": tile.intra.B, "BV": tile.intra.B}
        # what both kernels compute of a chunk has the same bits only if neither rounds a product
        # and a sum at once where the other does not: in float32 outputs would depend on later gates
        options |= {"enable_fp_fusion": False, **launch_options(terms, tile.intra)}
        grid, gated = (intra.u.shape[0] * HV,), terms.g is not None
        run: Any = cached(dplr_wy_kernel)[grid]
        options |= {"LIMIT": ANCHORED_TILES[dtype], "APART": APART[dtype] if gated else 0.0}
        run(**args, HAS_GATE=gated, **options)
        options["PIECES"] = 2 if options["BK"] > 32 else 1
        if options["APART"] > 0:
            total = grid[0]
            shared = {"total": total, "MAX_CHUNKS": MAX_CHUNKS}
            programs = max(-(-total // MAX_CHUNKS), min(total, TARGET_PROGRAMS))
            run = cached(dplr_wy_quarters_kernel)[programs,]
            run(**args, **options | shared)
        if gated:
            run = cached(dplr_intra_safe_kernel)[grid]
            run(**args, ones_ptr=_ones(terms), SHIFT=SHIFT[dtype], **options)

    def _score_grads(
        self,
        terms: LinearInputs,
        do: Tensor,
        intra: IntraChunk,
        states: ChunkStates,
        scale: float,
    ) -> tuple[ScoreGrads, dict[str, Tensor], Tensor | None]:
        """Gradients of the scores; of v and write; and the shares of beta's, of which this writes
        the first."""
        B, T, HV = terms.v.shape[:3]
        tile, _ = tile_of(terms)
        delta, like = terms.transition == "delta", intra.qb
        names = ("v",) if terms.write is None else ("v", "write")
        grads = {n: do.new_empty(do.shape) for n in names}
        dbeta = None
        scores = ScoreGrads(
            torch.empty_like(like),
            torch.empty_like(like),
            None if delta else torch.empty_like(like),
            None if delta else torch.empty_like(like),
            do.new_empty(like.shape[0], HV, 2, tile.C, dtype=torch.float32),
        )
        if terms.beta is not None:
            shares = -(-terms.q.shape[-1] // tile.grads.B)
            dbeta = do.new_empty(shares + 1, B, T, HV, dtype=torch.float32)
        self.launch_scores(terms, do, intra, states, scores, grads, dbeta, scale)
        return scores, grads, dbeta

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
        """scores, grads and the first of dbeta are written."""
        T, HV, V = terms.v.shape[1:]
        tile, WIDE = tile_of(terms)
        delta = terms.transition == "delta"
        run: Any = cached(dplr_scores_kernel)[(intra.qb.shape[0] * HV,)]
        run(
            v_ptr=terms.v,
            do_ptr=do,
            beta_ptr=terms.beta,
            write_ptr=terms.write,
            x_ptr=states.x,
            y_ptr=states.y,
            k_ptr=intra.k,
            qk_ptr=intra.qk,
            ak_ptr=intra.ak,
            dstates_ptr=None if delta else states.dstates,
            dv_ptr=grads["v"],
            dwrite_ptr=grads.get("write"),
            dbeta_ptr=dbeta,
            **scores.pointers(),
            cu_ptr=terms.cu_seqlens,
            scale=scale,
            T=T,
            N=terms.sequences,
            HV=HV,
            V=V,
            WIDE=WIDE,
            BK=min(64, WIDE),
            BV=tile.scores.B,
            DELTA=delta,
            **launch_options(terms, tile.scores),
        )

    def _dqkg(
        self,
        terms: LinearInputs,
        do: Tensor,
        states: ChunkStates,
        scores: ScoreGrads,
        dbeta: Tensor | None,
        strong: Tensor | None,
        scale: float,
    ) -> dict[str, Tensor]:
        """Gradients of q, k, and a, b, beta, g if given; that of beta in float32, and that of g
        in its dtype where it is of channels."""
        B, T, HV = terms.v.shape[:3]
        H, K = terms.q.shape[2:]
        shape = (B, T, HV, K)
        names = [n for n in "qkab" if getattr(terms, n) is not None]
        grads = {n: do.new_empty(shape) for n in names}
        if terms.g is not None:
            dtype = terms.g.dtype if terms.decay == "channel" else torch.float32
            grads["g"] = do.new_empty(shape, dtype=dtype)
        if terms.erase is not None:
            grads["erase"] = do.new_empty(shape)
        self.launch_dqkg(terms, do, states, scores, strong, grads, dbeta, scale)
        for name in names:
            grads[name] = sum_grouped_heads(grads[name], H)
        if terms.g is not None and terms.decay != "channel":
            grads["g"] = grads["g"].sum(-1)
        if dbeta is not None:
            grads["beta"] = dbeta.sum(0)
        return grads

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
        """Into grads: those of q, k, a, b and g [B, T, HV, K]; and into dbeta except for its first.

        Args:
            strong: which chunks are computed again, in sub-chunks [chunks, HV].
        """
        B, T, HV, V = terms.v.shape
        H, K = terms.q.shape[2:]
        tile, WIDE = tile_of(terms)
        args: dict[str, Any] = pointers(terms, ("q", "k", "a", "b", "g", "beta"))
        args |= {"v_ptr": None if terms.a is None else terms.v, "do_ptr": do}
        args |= {f"{name}_ptr": x for name, x in states._asdict().items()}
        args |= scores.pointers() | {f"d{name}_ptr": grads.get(name) for name in "qkabg"}
        args |= {"dbeta_ptr": dbeta, "strong_ptr": strong, "cu_ptr": terms.cu_seqlens}
        args |= {"scale": scale, "T": T, "N": terms.sequences, "HV": HV, "H": H, "tokens": B * T}
        kernel_tile = tile.grads
        options = {"K": K, "V": V, "WIDE": WIDE, "BK": kernel_tile.B, "BV": kernel_tile.B}
        options |= {**_gate_options(terms), **launch_options(terms, kernel_tile)}
        grid, gated = (-(-K // kernel_tile.B) * HV * states.x.shape[0],), terms.g is not None
        run: Any = cached(dplr_dqkg_kernel)[grid]
        apart = APART[do.dtype] if gated else 0.0
        run(**args, HAS_GATE=gated, APART=apart, QUARTERS=False, **options)
        if apart > 0:
            run(**args, HAS_GATE=True, APART=apart, QUARTERS=True, **options)
        if gated:
            options |= {"STEPS": tile.steps, "LIMIT": LIMIT[do.dtype], "QUARTERS": apart > 0}
            run = cached(dplr_intra_safe_bwd_kernel)[grid]
            run(**args, ones_ptr=_ones(terms), **options)


def empty_intra_chunk(terms: LinearInputs, *, for_backward: bool) -> IntraChunk:
    """Memory for what intra_chunk writes."""
    HV, V = terms.v.shape[2:]
    tile, WIDE = tile_of(terms)
    chunks, C, v = num_chunks(terms, tile.C), tile.C, terms.v
    delta, gated = terms.transition == "delta", terms.g is not None
    size, square = (chunks, HV, C, WIDE), (chunks, HV, C, C)
    qb = v.new_empty(square)
    # ak and r are not written unless backward wants them
    return IntraChunk(
        q=v.new_empty(size),
        w=v.new_empty(size),
        b=v.new_empty(size),
        k=None if delta else v.new_empty(size),
        u=v.new_empty(chunks, HV, V, C, dtype=torch.float32),
        total=v.new_empty(chunks, HV, WIDE, dtype=torch.float32) if gated else None,
        qb=qb,
        qk=None if delta else v.new_empty(square),
        ak=None if delta else v.new_empty(square) if for_backward else qb,
        r=v.new_empty(square) if for_backward else qb,
        strong=v.new_empty(chunks, HV, dtype=torch.int32) if gated else None,
    )


def _empty_states(terms: LinearInputs, intra: IntraChunk) -> tuple[Tensor, Tensor]:
    """x and the states before each chunk, to be written."""
    chunks, HV, V, C = intra.u.shape
    v = terms.v
    return v.new_empty(chunks, HV, V, C), v.new_empty(chunks, HV, V, intra.q.shape[-1])


def _gate_options(terms: LinearInputs) -> dict[str, Any]:
    return {
        "DELTA": terms.transition == "delta",
        "CHANNEL": terms.decay == "channel",
        # bfloat16 products are wrong in the interpreter
        "FP32": terms.q.dtype == torch.float32 or INTERPRETED,
    }


def _ones(terms: LinearInputs) -> Tensor:
    dtype = torch.float32 if _gate_options(terms)["FP32"] else torch.bfloat16
    return gate_ones(terms.q.device, tile_of(terms)[0].C, dtype)


_BACKEND = TritonDplr()
forward, backward = _BACKEND.forward, _BACKEND.backward
