"""The stages of per-channel decay, and of free a and b, by Triton kernels (kernels/linear/dplr.py
has their order)."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, dplr, prefix_states
from slipstream.kernels.linear.dplr import ChunkGrads, IntraChunk, dplr_args
from slipstream.kernels.linear.inputs import LinearInputs, pointers
from slipstream.kernels.linear.plan import INTERPRETED
from slipstream.kernels.linear.segments import Segments, num_sequences, scan_args, sequence_args
from slipstream.kernels.linear.triton.common.gate_ones import gate_ones
from slipstream.kernels.linear.triton.common.state_passing import state_passing
from slipstream.kernels.linear.triton.delta import plan
from slipstream.kernels.linear.triton.dplr import chunk, dqkg, intra_safe_bwd, tiles, wy
from slipstream.kernels.linear.triton.dplr.scores import dplr_scores_kernel
from slipstream.kernels.linear.triton.scalar_decay.tiles import family_of
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cache, cached


@cache
def _tile(
    device: torch.device, K: int, V: int, bytes_each: int, free: bool
) -> tuple[tiles.DplrTile, int]:
    return tiles.choose("interpreter" if INTERPRETED else family_of(device), K, V, bytes_each, free)


def tile_of(terms: LinearInputs) -> tuple[tiles.DplrTile, int]:
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    return _tile(terms.q.device, K, V, terms.q.element_size(), terms.transition == "dplr")


class TritonDplr(dplr.DplrBackend):
    def chunk(self, terms: LinearInputs) -> int:
        return tile_of(terms)[0].C

    def padded_width(self, terms: LinearInputs) -> int:
        return tile_of(terms)[1]

    def beta_shares(self, terms: LinearInputs) -> int:
        return -(-terms.q.shape[-1] // tile_of(terms)[0].grads.B)

    def can_pass_states(self, terms: LinearInputs) -> bool:
        return plan.can_pass_states(terms)

    def choose_segments(self, terms: LinearInputs) -> Segments | None:
        """A program counts as one for 64 columns of V."""
        HV, V = terms.v.shape[2:]
        programs = -(-V // 64) * HV * terms.sequences
        return plan.segments_for_programs(terms, programs, self.chunk(terms))

    def segment_transition(
        self, terms: LinearInputs, intra: IntraChunk, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        E = intra.u.new_empty(segments.count, HV, K, V)
        M = intra.u.new_empty(segments.count, HV, K, K)
        self.chunk_fwd(terms, intra, s_out=E, m=M, segments=segments)
        return E, M

    def state_passing(
        self,
        terms: LinearInputs,
        segments: Segments,
        E: Tensor,
        M: Any,
        s_in: Tensor | None,
        s_out: Tensor | None,
        reverse: bool = False,
        exchange: backend.Exchange | None = None,
    ) -> Tensor:
        state_passing(terms, segments, E, M, s_in, s_out, reverse, exchange)
        return E

    def intra_chunk(
        self, terms: LinearInputs, scale: float, intra: IntraChunk, for_backward: bool
    ) -> None:
        dtype = terms.v.dtype
        tile = tile_of(terms)[0]
        # R is rounded to the inputs' dtype; C = 64 is wgmma's, which is slow with tf32
        # (delta/solve_tril.py)
        inner = fp32_dot_precision()
        if dtype != torch.float32:
            inner = "halves" if tile.C == 64 else "tf32"
        names = ("q", "k", "a", "b", "v", "g", "beta")
        args: dict[str, Any] = {**pointers(terms, names), **intra.pointers()}
        args |= {"scale": scale, "keep": int(for_backward), **dplr_args(terms)}
        options: dict[str, Any] = {"STEPS": tile.steps, **_gate_options(terms)}
        options |= {"INNER": "ieee" if INTERPRETED else inner, "BK": tile.intra.B}
        # what both compilations make of a chunk has the same bits only if neither rounds a product
        # and a sum at once where the other does not: in float32 outputs would depend on later gates
        options |= {"enable_fp_fusion": False, **_launch_options(terms, tile.intra)}
        gated = terms.g is not None
        options |= {
            "LIMIT": tiles.RANGES[dtype].whole,
            "SHIFT": tiles.RANGES[dtype].shift,
            "HAS_GATE": gated,
        }
        options |= {"APART": tiles.RANGES[dtype].apart if gated else 0.0}
        run: Any = cached(wy.dplr_wy_kernel)[(intra.u.shape[0] * terms.v.shape[2],)]
        run(**args, ones_ptr=None, STRONG=False, **options)
        if gated:
            run(**args, ones_ptr=_ones(terms), STRONG=True, **options)

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
        segments: Segments | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> None:
        """Or, of segments, m and their term of the state, s_out."""
        HV, V = terms.v.shape[2:]
        tile = tile_of(terms)[0]
        make = "ends" if m is not None else "o" if states is None else "states"
        kernel_tile = tile.fwd if make == "o" else tile.fwd_states
        tiles = -(-V // kernel_tile.B) + (
            -(-terms.q.shape[-1] // kernel_tile.B) if make == "ends" else 0
        )
        launch: Any = cached(chunk.dplr_chunk_fwd_kernel)[
            (tiles * HV * num_sequences(terms, segments),)
        ]
        launch(
            v_ptr=None if intra.k is None else terms.v,
            q_ptr=intra.q if make == "o" else None,
            w_ptr=intra.w,
            b_ptr=intra.b,
            k_ptr=intra.k,
            u_ptr=intra.u,
            x_ptr=x,
            total_ptr=intra.total,
            qb_ptr=intra.qb if make == "o" else None,
            qk_ptr=intra.qk if make == "o" else None,
            o_ptr=o,
            states_ptr=states,
            m_ptr=m,
            **scan_args(terms, segments, s_in, s_out),
            K=terms.q.shape[-1],
            V=V,
            OUTPUT=make,
            DELTA=terms.transition == "delta",
            **(prefix.pointers() if prefix else prefix_states.NO_POINTERS),
            **_launch_options(terms, kernel_tile, is_scan=make == "o"),
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
        segments: Segments | None = None,
    ) -> None:
        HV, V = terms.v.shape[2:]
        kernel_tile = tile_of(terms)[0].dstate
        launch: Any = cached(chunk.dplr_chunk_dstate_kernel)[
            (-(-V // kernel_tile.B) * HV * num_sequences(terms, segments),)
        ]
        launch(
            do_ptr=do,
            q_ptr=intra.q,
            w_ptr=intra.w,
            b_ptr=intra.b,
            total_ptr=intra.total,
            qb_ptr=intra.qb,
            r_ptr=None if y is None else intra.r,
            y_ptr=y,
            states_ptr=dstates,
            **scan_args(terms, segments, s_in, s_out),
            K=terms.q.shape[-1],
            V=V,
            OUTPUT="ends" if y is None else "states",
            **_launch_options(terms, kernel_tile, is_scan=True),
        )

    def score_grads(self, terms: LinearInputs, intra: IntraChunk, made: ChunkGrads) -> None:
        do, scale, states, scores, _, dbeta, grads = made
        HV, V = terms.v.shape[2:]
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
            scale=scale,
            V=V,
            **sequence_args(terms),
            BK=min(64, WIDE),
            DELTA=delta,
            **_launch_options(terms, tile.scores),
        )

    def dqkg(self, terms: LinearInputs, made: ChunkGrads) -> None:
        do, scale, states, scores, strong, dbeta, grads = made
        (B, T, HV), K = terms.v.shape[:3], terms.q.shape[-1]
        tile = tile_of(terms)[0]
        args: dict[str, Any] = pointers(terms, ("q", "k", "a", "b", "g", "beta"))
        args |= {"v_ptr": None if terms.a is None else terms.v, "do_ptr": do}
        args |= {f"{name}_ptr": x for name, x in states._asdict().items()}
        args |= scores.pointers() | {f"d{name}_ptr": grads.get(name) for name in "qkabg"}
        args |= {"dbeta_ptr": dbeta, "strong_ptr": strong, "scale": scale, "tokens": B * T}
        args |= dplr_args(terms)
        kernel_tile = tile.grads
        options: dict[str, Any] = {"BK": kernel_tile.B, **_gate_options(terms)}
        options |= _launch_options(terms, kernel_tile)
        grid, gated = (-(-K // kernel_tile.B) * HV * states.x.shape[0],), terms.g is not None
        run: Any = cached(dqkg.dplr_dqkg_kernel)[grid]
        run(**args, HAS_GATE=gated, APART=tiles.RANGES[do.dtype].apart if gated else 0.0, **options)
        if gated:
            options |= {"STEPS": tile.steps, "LIMIT": tiles.RANGES[do.dtype].limit}
            run = cached(intra_safe_bwd.dplr_intra_safe_bwd_kernel)[grid]
            run(**args, ones_ptr=_ones(terms), **options)


def _launch_options(
    terms: LinearInputs, kernel_tile: plan.KernelTile, is_scan: bool = False
) -> dict[str, Any]:
    # three products for one over 256 channels at once leave the compiler not a register
    simple = is_scan and terms.q.shape[-1] > 128
    tile, wide = tile_of(terms)
    return {
        "C": tile.C,
        "WIDE": wide,
        "BV": kernel_tile.B,
        "PRECISION": "ieee" if simple else fp32_dot_precision(),
        "num_warps": kernel_tile.warps,
        "num_stages": kernel_tile.stages,
    }


def _gate_options(terms: LinearInputs) -> dict[str, Any]:
    return {
        "CHANNEL": terms.decay == "channel",
        # bfloat16 products are wrong in the interpreter
        "FP32": terms.q.dtype == torch.float32 or INTERPRETED,
    }


def _ones(terms: LinearInputs) -> Tensor:
    dtype = torch.float32 if _gate_options(terms)["FP32"] else torch.bfloat16
    return gate_ones(terms.q.device, tile_of(terms)[0].C, dtype)


BACKEND = TritonDplr()
forward, backward = BACKEND.forward, BACKEND.backward
