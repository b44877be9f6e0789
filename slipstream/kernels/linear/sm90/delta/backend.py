"""The delta rule's stages on sm_90 (kernels/linear/delta.py has their order).

WY factors and segments are those of the Triton back end, so that either can be used with the
other's. Nothing depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.backend import BackendCapabilities, Exchange
from slipstream.kernels.linear.delta import Checkpoints, DeltaBackend, EntryStates, WYFactors
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.prefix_states import NO_POINTERS, PrefixStates
from slipstream.kernels.linear.segments import (
    CHUNK,
    NUM_SMS,
    TILE_V,
    Segments,
    delta_grid,
    delta_scan_sm90,
    delta_sm90,
    num_chunks,
    size_args,
)
from slipstream.kernels.linear.sm90.common.tma import align16, align_for_tma, tma_descriptor
from slipstream.kernels.linear.sm90.delta import bwd_fused_launch, segment_launch
from slipstream.kernels.linear.sm90.delta.bwd_schedule import (
    BackwardSchedule,
    choose_schedule,
    empty_checkpoints,
    schedule_of_segments,
)
from slipstream.kernels.linear.sm90.delta.chunk_dstate import delta_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.delta.chunk_fwd import delta_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.delta.chunk_fwd_2tile import delta_chunk_fwd_2tile_sm90_kernel
from slipstream.kernels.linear.sm90.delta.dqkg import delta_dqkg_sm90_kernel
from slipstream.kernels.linear.sm90.delta.segment_launch import BASE, STAGES
from slipstream.kernels.linear.sm90.delta.solve_tril import delta_solve_tril_sm90_kernel
from slipstream.runtime.consistent import consistent_scope
from slipstream.runtime.launch_cache import cached

CAPABILITIES = BackendCapabilities(saves_wy=True, exchanges=True)
# Value heads whose gradients of q and k are added up at once, at most: each sum is rounded.
HEADS_PER_SEMAPHORE = 4
TILE_K = 64  # channels of K that the gradients' kernel takes at a time
GRADS = {"num_warps": 4, "maxnreg": 255}
SOLVE = {"num_warps": 4, "maxnreg": 80}  # six programs fit a multiprocessor


class Sm90Delta(DeltaBackend):
    reuses_w = True

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return super().to_kernel_layout(align_for_tma(terms))

    def contiguous(self, x: Tensor) -> Tensor:
        return align16(x).contiguous()

    def empty_checkpoints(
        self, terms: LinearInputs, exchange: Exchange | None
    ) -> Checkpoints | None:
        schedule = self._schedule(terms, exchange)
        if schedule is None:
            return None
        return Checkpoints(schedule.interval, empty_checkpoints(terms, schedule))

    def _schedule(self, terms: LinearInputs, exchange: Exchange | None) -> BackwardSchedule | None:
        if exchange is not None and exchange.segment_tokens is not None:
            return schedule_of_segments(terms, exchange.segment_tokens)
        return choose_schedule(terms)

    def chunk(self, terms: LinearInputs) -> int:
        return CHUNK

    def num_chunks(self, terms: LinearInputs) -> int:
        return num_chunks(terms, CHUNK)

    def can_pass_states(self, terms: LinearInputs) -> bool:
        return True

    def choose_segments(self, terms: LinearInputs) -> Segments | None:
        return delta_sm90(terms)

    def heads_per_sum(self, terms: LinearInputs) -> int:
        """A divisor of how many share q and k."""
        share = terms.v.shape[2] // terms.q.shape[2]
        return max(n for n in range(1, HEADS_PER_SEMAPHORE + 1) if share % n == 0)

    def solve_tril(self, terms: LinearInputs) -> WYFactors:
        """With a gate, transition_lognorm is made too."""
        B, T, HV, _ = terms.v.shape
        (H, K), has_gate = terms.q.shape[2:], terms.g is not None
        r = terms.v.new_empty(B, T, HV, CHUNK)
        size = (self.num_chunks(terms), HV, 1 + has_gate, CHUNK)
        beta_gate, lognorm = r.new_empty(size, dtype=torch.float32), None
        if has_gate:
            lognorm = beta_gate.new_empty(*size[:2], CHUNK // BASE)
        launch: Any = cached(delta_solve_tril_sm90_kernel)[(size[0] * HV,)]
        launch(
            k_desc=tma_descriptor(terms.k, H * K, CHUNK, K),
            r_desc=tma_descriptor(r, HV * CHUNK, CHUNK, CHUNK),
            r_ptr=r,
            g_ptr=terms.g,
            beta_ptr=terms.beta,
            beta_gates_ptr=beta_gate,
            lognorm_ptr=lognorm,
            cu_ptr=terms.cu_seqlens,
            T=T,
            N=terms.sequences,
            HV=HV,
            H=H,
            K=K,
            C=CHUNK,
            BASE=BASE,
            HAS_GATE=has_gate,
            PACKED=terms.cu_seqlens is not None,
            **SOLVE,
        )
        return WYFactors(r, beta_gate, lognorm)

    def chunk_fwd(
        self,
        terms: LinearInputs,
        wy: WYFactors,
        scale: float,
        out: Tensor,
        *,
        states: Tensor | None = None,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        segments: Segments | None = None,
        checkpoints: Checkpoints | None = None,
        prefix: PrefixStates | None = None,
    ) -> None:
        """In one of two kernels."""
        HV, V = terms.v.shape[2:]
        H, K = terms.q.shape[2:]
        interval, saved_states = checkpoints or (0, None)
        kernel, tile = delta_chunk_fwd_sm90_kernel, TILE_V
        sizes = {**size_args(terms, segments), "SPLIT": segments is not None}
        if segments is None and self._use_2tile(terms):  # which has whole sequences alone
            kernel, tile = delta_chunk_fwd_2tile_sm90_kernel, 2 * TILE_V
            del sizes["segment"], sizes["SPLIT"]
        launch: Any = cached(kernel)[delta_grid(terms, segments, tile)]
        launch(
            q_desc=tma_descriptor(terms.q, H * K, CHUNK, K) if states is None else None,
            k_desc=tma_descriptor(terms.k, H * K, CHUNK, K),
            v_desc=tma_descriptor(terms.v, HV * V, CHUNK, TILE_V),
            r_desc=tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
            o_desc=tma_descriptor(out, HV * V, CHUNK, TILE_V),
            states_desc=tma_descriptor(states, K, TILE_V, K),
            checkpoints_desc=tma_descriptor(saved_states, K, TILE_V, K),
            o_ptr=out,
            beta_gates_ptr=wy.beta_gate,
            s_in_ptr=s_in,
            s_out_ptr=s_out,
            cu_ptr=terms.cu_seqlens,
            scale=scale,
            every=interval,
            SAVE_STATES=states is not None,
            SAVE_CHECKPOINTS=checkpoints is not None,
            **(prefix.pointers() if prefix else NO_POINTERS),
            **sizes,
            **_flags(terms, s_in, s_out),
        )

    def _use_2tile(self, terms: LinearInputs) -> bool:
        """Whether a program takes two tiles of V: with one each they would not all run at once."""
        HV, V = terms.v.shape[2:]
        sequences = 1 if consistent_scope.on else terms.sequences
        return V % (2 * TILE_V) == 0 and V // TILE_V * HV * sequences > NUM_SMS

    def chunk_dstate(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: WYFactors,
        scale: float,
        dv: Tensor,
        dstates: Tensor,
        *,
        s_in: Tensor | None,
        s_out: Tensor | None,
        segments: Segments | None,
    ) -> None:
        HV, V = terms.v.shape[2:]
        H, K = terms.q.shape[2:]
        launch: Any = cached(delta_chunk_dstate_sm90_kernel)[delta_grid(terms, segments)]
        launch(
            q_desc=tma_descriptor(terms.q, H * K, CHUNK, K),
            k_desc=tma_descriptor(terms.k, H * K, CHUNK, K),
            do_desc=tma_descriptor(do, HV * V, CHUNK, TILE_V),
            r_desc=tma_descriptor(wy.r, HV * CHUNK, CHUNK, CHUNK),
            dv_desc=tma_descriptor(dv, HV * V, CHUNK, TILE_V),
            states_desc=tma_descriptor(dstates, K, TILE_V, K),
            dv_ptr=dv,
            beta_gates_ptr=wy.beta_gate,
            lognorm_ptr=None,
            s_in_ptr=s_in,
            s_out_ptr=s_out,
            cu_ptr=terms.cu_seqlens,
            scale=scale,
            SPLIT=segments is not None,
            **size_args(terms, segments),
            **_flags(terms, s_in, s_out),
        )

    def chunk_dqkg(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: WYFactors,
        w: Tensor,
        dv: Tensor,
        states: Tensor,
        dstates: Tensor,
        scale: float,
        grads: dict[str, Tensor],
    ) -> None:
        T, HV, V = terms.v.shape[1:]
        H, K = terms.q.shape[2:]
        heads, semaphores = grads["q"].shape[2], None
        if heads < HV:  # how many value heads have added up a chunk's gradients of q and k
            semaphores = w.new_zeros(states.shape[0] * heads, dtype=torch.int32)
        launch: Any = cached(delta_dqkg_sm90_kernel)[(states.shape[0] * HV,)]
        launch(
            q_desc=tma_descriptor(terms.q, H * K, CHUNK, TILE_K),
            k_desc=tma_descriptor(terms.k, H * K, CHUNK, TILE_K),
            do_desc=tma_descriptor(do, HV * V, CHUNK, V),
            w_desc=tma_descriptor(w, HV * V, CHUNK, V),
            dv_desc=tma_descriptor(dv, HV * V, CHUNK, V),
            states_desc=tma_descriptor(states, K, V, TILE_K),
            dstates_desc=tma_descriptor(dstates, K, V, TILE_K),
            dq_desc=tma_descriptor(grads["q"], heads * K, CHUNK, TILE_K),
            dk_desc=tma_descriptor(grads["k"], heads * K, CHUNK, TILE_K),
            dq_ptr=grads["q"],
            dk_ptr=grads["k"],
            beta_gates_ptr=wy.beta_gate,
            dbeta_ptr=grads["beta"],
            dg_ptr=grads.get("g"),
            cu_ptr=terms.cu_seqlens,
            semaphores_ptr=semaphores,
            scale=scale,
            T=T,
            N=terms.sequences,
            HV=HV,
            H=H,
            G=HV // heads,
            K=K,
            V=V,
            BK=TILE_K,
            C=CHUNK,
            HAS_GATE=terms.g is not None,
            PACKED=terms.cu_seqlens is not None,
            GROUPED_HEADS=heads < HV,
            **GRADS,
        )

    def scan_ends(
        self,
        terms: LinearInputs,
        wy: WYFactors,
        final: Tensor | None,
        exchange: Exchange | None = None,
    ) -> dict[str, Any]:
        """With consistent=True the states of segments are those of one scan."""
        segments = None
        if consistent_scope.on and exchange is None:
            segments = delta_scan_sm90(terms)
        if segments is None:
            return super().scan_ends(terms, wy, final, exchange)
        states = segment_launch.states_before(terms, wy, segments, final)
        return {"segments": segments, "s_in": states, "s_out": None}

    def entry_states(
        self,
        terms: LinearInputs,
        wy: WYFactors,
        segments: Segments,
        final: Tensor | None,
        exchange: Exchange | None = None,
    ) -> EntryStates:
        V = terms.v.shape[-1]
        across = exchange is not None
        # one rank has the state before all in E of a sequence's first segment
        s_in = None if across else terms.initial_state
        made, m_is_zero = segment_launch.segment_transition(terms, wy, s_in, segments, every=across)
        E, M = made[..., :V], made[..., V:]  # split's list is no result that a replay records
        ends = terms.initial_state, segments, exchange
        states = segment_launch.state_passing(terms, E, M, m_is_zero, *ends)
        return EntryStates(states, None if across else (M, m_is_zero), final)

    def entry_dstates(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: WYFactors,
        scale: float,
        dfinal: Tensor | None,
        transition: tuple[Tensor, Tensor],
        segments: Segments,
        dstate: Tensor | None,
        exchange: Exchange | None = None,
    ) -> EntryStates:
        if exchange is not None:
            states = segment_launch.entry_dstates(terms, do, wy, scale, dfinal, segments, exchange)
            return EntryStates(states, None, dstate)
        dE = segment_launch.segment_transition_bwd(terms, do, wy, scale, dfinal, segments)
        states = segment_launch.state_passing(
            terms, dE, *transition, dfinal, segments, reverse=True
        )
        return EntryStates(states, transition, dstate)

    def fused_gradients(
        self,
        terms: LinearInputs,
        do: Tensor,
        dfinal: Tensor | None,
        wy: WYFactors,
        scale: float,
        dstate: Tensor | None,
        checkpoints: Tensor | None,
        exchange: Exchange | None = None,
    ) -> dict[str, Tensor] | None:
        """Where the kernel's schedule has a place for it (bwd_schedule.py)."""
        schedule = self._schedule(terms, exchange)
        if schedule is None:
            return None
        grads = bwd_fused_launch.empty_grads(terms, do, self.heads_per_sum(terms))
        if checkpoints is None:  # forward runs once more, for these alone
            checkpoints = empty_checkpoints(terms, schedule)
            ends = self.scan_ends(terms, wy, None, None if exchange is None else exchange.local)
            ends["checkpoints"] = Checkpoints(schedule.interval, checkpoints)
            self.chunk_fwd(terms, wy, scale, grads["v"], **ends)
        return bwd_fused_launch.backward(
            terms, do, dfinal, wy, scale, dstate, schedule, grads, checkpoints, exchange
        )


def _flags(terms: LinearInputs, s_in: Tensor | None, s_out: Tensor | None) -> dict[str, Any]:
    """The constants of all kernels that go from chunk to chunk."""
    return {
        "K": terms.q.shape[-1],
        "V": terms.v.shape[-1],
        "BV": TILE_V,
        "C": CHUNK,
        "ST": STAGES,
        "HAS_GATE": terms.g is not None,
        "HAS_S_IN": s_in is not None,
        "HAS_S_OUT": s_out is not None,
        "PACKED": terms.cu_seqlens is not None,
        "num_warps": 4,
        "maxnreg": 128,  # of 16 warps: what all partitions share
    }


_BACKEND = Sm90Delta()
forward, backward = _BACKEND.forward, _BACKEND.backward
