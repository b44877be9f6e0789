"""The delta rule's stages on sm_90 (kernels/linear/delta.py has their order).

WY factors and segments are those of the Triton back end, so that either can be used with the
other's. Where heads are many the gradients are one kernel (chunk_bwd), by bwd_schedule.py. Nothing
depends on device values.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, delta, inputs, prefix_states
from slipstream.kernels.linear import segments as segmentation
from slipstream.kernels.linear.inputs import Cotangents, LinearInputs
from slipstream.kernels.linear.sm90 import common
from slipstream.kernels.linear.sm90.delta import bwd_fused, bwd_schedule, dqkg, segment_launch
from slipstream.kernels.linear.sm90.delta.chunk_dstate import delta_chunk_dstate_sm90_kernel
from slipstream.kernels.linear.sm90.delta.chunk_fwd import delta_chunk_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.delta.fused_fwd import delta_fused_fwd_sm90_kernel
from slipstream.kernels.linear.sm90.delta.solve_tril import delta_solve_tril_sm90_kernel
from slipstream.runtime import backends, consistent, launch_cache

SCAN = segment_launch.SCAN | {"maxnreg": 128}  # of 16 warps: what all partitions share
MAX_WORKSPACES = segmentation.NUM_SMS  # of chunk_bwd, whose programs run at once
# By V: registers of all warps, of those of the gradients, and of those that load and write.
BWD_OPTIONS: dict[int, dict[str, Any]] = {
    64: {"num_warps": 4, "maxnreg": 168, "REGISTERS": 208, "LOAD_REGISTERS": 32},
    128: {"num_warps": 8, "maxnreg": 128, "REGISTERS": 184, "LOAD_REGISTERS": 24},
}


class Sm90Delta(delta.DeltaBackend):
    saves = reuses_w = True

    def to_kernel_layout(self, terms: LinearInputs) -> LinearInputs:
        return super().to_kernel_layout(common.align_for_tma(terms))

    def contiguous(self, x: Tensor) -> Tensor:
        return common.align16(x).contiguous()

    def empty_checkpoints(
        self, terms: LinearInputs, exchange: backend.Exchange | None
    ) -> delta.Checkpoints | None:
        schedule = self._schedule(terms, exchange)
        if schedule is None:
            return None
        return delta.Checkpoints(schedule.interval, bwd_schedule.empty_checkpoints(terms, schedule))

    def _schedule(
        self, terms: LinearInputs, exchange: backend.Exchange | None
    ) -> bwd_schedule.BackwardSchedule | None:
        if exchange is not None and exchange.segment_tokens is not None:
            return bwd_schedule.schedule_of_segments(terms, exchange.segment_tokens)
        return bwd_schedule.choose_schedule(terms)

    def chunk(self, terms: LinearInputs) -> int:
        return segmentation.CHUNK

    def num_chunks(self, terms: LinearInputs) -> int:
        return segmentation.num_chunks(terms, segmentation.CHUNK)

    def can_pass_states(self, terms: LinearInputs) -> bool:
        return True

    def choose_segments(self, terms: LinearInputs) -> segmentation.Segments | None:
        return segmentation.delta_sm90(terms)

    def fuses(self, terms: LinearInputs) -> bool:
        """Where two tiles of V of all heads and sequences would not all run at once, and none is
        much longer than the others."""
        HV, V = terms.v.shape[2:]
        tiles = V // segmentation.TILE_V
        many = tiles % 2 == 0 and tiles * HV * terms.sequences > segmentation.NUM_SMS
        waits = consistent.consistent_scope.on or segmentation.waits_for_longest(terms, tiles)
        return many and not waits

    def heads_per_sum(self, terms: LinearInputs) -> int:
        """A divisor of how many share q and k, at most 4: each sum is rounded."""
        share = terms.v.shape[2] // terms.q.shape[2]
        return max(n for n in range(1, 4 + 1) if share % n == 0)

    def solve_tril(self, terms: LinearInputs) -> delta.WYFactors:
        """With a gate, transition_lognorm is made too."""
        B, T, HV, _ = terms.v.shape
        (H, K), has_gate = terms.q.shape[2:], terms.g is not None
        r = terms.v.new_empty(B, T, HV, segmentation.CHUNK)
        size = (self.num_chunks(terms), HV, 1 + has_gate, segmentation.CHUNK)
        beta_gate, lognorm = r.new_empty(size, dtype=torch.float32), None
        if has_gate:
            lognorm = beta_gate.new_empty(*size[:2], segmentation.CHUNK // segment_launch.BASE)
        launch: Any = launch_cache.cached(delta_solve_tril_sm90_kernel)[(size[0] * HV,)]
        launch(
            k_desc=common.token_tiles(terms.k, K),
            r_desc=common.token_tiles(r, segmentation.CHUNK),
            r_ptr=r,
            g_ptr=terms.g,
            beta_ptr=terms.beta,
            beta_gates_ptr=beta_gate,
            lognorm_ptr=lognorm,
            **segmentation.sequence_args(terms),
            H=H,
            K=K,
            C=segmentation.CHUNK,
            BASE=segment_launch.BASE,
            HAS_GATE=has_gate,
            num_warps=4,
            maxnreg=80,  # six programs fit a multiprocessor
        )
        return delta.WYFactors(r, beta_gate, lognorm)

    def chunk_fwd(
        self,
        terms: LinearInputs,
        wy: delta.WYFactors,
        scale: float,
        out: Tensor,
        *,
        states: Tensor | None = None,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        segments: segmentation.Segments | None = None,
        checkpoints: delta.Checkpoints | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> None:
        """In one of two kernels."""
        K = terms.q.shape[-1]
        interval, saved_states = checkpoints or (0, None)
        args: dict[str, Any] = delta.delta_args(terms, segments, s_in, s_out)
        args |= {"o_ptr": out, "scale": scale, "every": interval}
        if segments is None and states is None and prefix is None and self.fuses(terms):
            del args["segment"], args["SPLIT"]
            HV = terms.v.shape[2]
            (heads,) = segmentation.delta_grid(terms, None, 2 * segmentation.TILE_V)
            programs = (min(heads, segmentation.NUM_SMS),)
            run: Any = launch_cache.cached(delta_fused_fwd_sm90_kernel)[programs]
            run(
                **{f"{name}_desc": common.token_tiles(getattr(terms, name), 64) for name in "qkv"},
                o_desc=common.token_tiles(out, 64),
                g_ptr=terms.g,
                beta_ptr=terms.beta,
                r_desc=common.tma_descriptor(wy and wy.r, HV * segmentation.CHUNK, 32, 16),
                saved_desc=common.tma_descriptor(saved_states, K, 64, 64),
                C=segmentation.CHUNK,
                **args,
                num_warps=4,
            )
            return
        grid = segmentation.delta_grid(terms, segments)
        launch: Any = launch_cache.cached(delta_chunk_fwd_sm90_kernel)[grid]
        launch(
            q_desc=common.token_tiles(terms.q, K) if states is None else None,
            k_desc=common.token_tiles(terms.k, K),
            v_desc=common.token_tiles(terms.v, segmentation.TILE_V),
            r_desc=common.token_tiles(wy.r, segmentation.CHUNK),
            o_desc=common.token_tiles(out, segmentation.TILE_V),
            states_desc=common.tma_descriptor(states, K, segmentation.TILE_V, K),
            checkpoints_desc=common.tma_descriptor(saved_states, K, segmentation.TILE_V, K),
            beta_gates_ptr=wy.beta_gate,
            SAVE_STATES=states is not None,
            SAVE_CHECKPOINTS=checkpoints is not None,
            **(prefix.pointers() if prefix else prefix_states.NO_POINTERS),
            **args,
            **SCAN,
        )

    def chunk_dstate(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: delta.WYFactors,
        scale: float,
        dv: Tensor,
        dstates: Tensor,
        *,
        s_in: Tensor | None,
        s_out: Tensor | None,
        segments: segmentation.Segments | None,
    ) -> None:
        K = terms.q.shape[-1]
        launch: Any = launch_cache.cached(delta_chunk_dstate_sm90_kernel)[
            segmentation.delta_grid(terms, segments)
        ]
        launch(
            q_desc=common.token_tiles(terms.q, K),
            k_desc=common.token_tiles(terms.k, K),
            do_desc=common.token_tiles(do, segmentation.TILE_V),
            r_desc=common.token_tiles(wy.r, segmentation.CHUNK),
            beta_gates_ptr=wy.beta_gate,
            dv_desc=common.token_tiles(dv, segmentation.TILE_V),
            states_desc=common.tma_descriptor(dstates, K, segmentation.TILE_V, K),
            dv_ptr=dv,
            lognorm_ptr=None,
            scale=scale,
            **delta.delta_args(terms, segments, s_in, s_out),
            **SCAN,
        )

    def chunk_dqkg(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: delta.WYFactors,
        w: Tensor,
        dv: Tensor,
        states: Tensor,
        dstates: Tensor,
        scale: float,
        grads: dict[str, Tensor],
    ) -> None:
        (HV, V), (H, K) = terms.v.shape[2:], terms.q.shape[2:]
        heads, semaphores = grads["q"].shape[2], None
        if heads < HV:  # how many value heads have added up a chunk's gradients of q and k
            semaphores = w.new_zeros(states.shape[0] * heads, dtype=torch.int32)
        launch: Any = launch_cache.cached(dqkg.delta_dqkg_sm90_kernel)[(states.shape[0] * HV,)]
        launch(
            q_desc=common.token_tiles(terms.q, segmentation.TMA_COLUMNS),
            k_desc=common.token_tiles(terms.k, segmentation.TMA_COLUMNS),
            do_desc=common.token_tiles(do, V),
            w_desc=common.token_tiles(w, V),
            dv_desc=common.token_tiles(dv, V),
            states_desc=common.tma_descriptor(states, K, V, segmentation.TMA_COLUMNS),
            dstates_desc=common.tma_descriptor(dstates, K, V, segmentation.TMA_COLUMNS),
            dq_desc=common.token_tiles(grads["q"], segmentation.TMA_COLUMNS),
            dk_desc=common.token_tiles(grads["k"], segmentation.TMA_COLUMNS),
            dq_ptr=grads["q"],
            dk_ptr=grads["k"],
            beta_gates_ptr=wy.beta_gate,
            dbeta_ptr=grads["beta"],
            dg_ptr=grads.get("g"),
            semaphores_ptr=semaphores,
            scale=scale,
            **segmentation.sequence_args(terms),
            H=H,
            G=HV // heads,
            K=K,
            V=V,
            BK=segmentation.TMA_COLUMNS,
            C=segmentation.CHUNK,
            HAS_GATE=terms.g is not None,
            GROUPED_HEADS=heads < HV,
            num_warps=4,
            maxnreg=255,
        )

    def scan_ends(
        self,
        terms: LinearInputs,
        wy: delta.WYFactors,
        final: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> dict[str, Any]:
        """With consistent=True the states of segments are those of one scan."""
        segments = None
        if consistent.consistent_scope.on and exchange is None:
            HV, V = terms.v.shape[2:]
            segments = segmentation.scanned_sm90(terms, V // segmentation.TILE_V * HV)
        if segments is None:
            return super().scan_ends(terms, wy, final, exchange)
        states = segment_launch.states_before(terms, wy, segments, final)
        return {"segments": segments, "s_in": states, "s_out": None}

    def entry_states(
        self,
        terms: LinearInputs,
        wy: delta.WYFactors,
        segments: segmentation.Segments,
        final: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> delta.EntryStates:
        V = terms.v.shape[-1]
        across = exchange is not None
        # one rank has the state before all in E of a sequence's first segment
        s_in = None if across else terms.initial_state
        made, m_is_zero = segment_launch.segment_transition(terms, wy, s_in, segments, every=across)
        E, M = made[..., :V], made[..., V:]  # split's list is no result that a replay records
        ends = terms.initial_state, segments, exchange
        states = segment_launch.state_passing(terms, E, M, m_is_zero, *ends)
        return delta.EntryStates(states, None if across else (M, m_is_zero), final)

    def entry_dstates(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: delta.WYFactors,
        scale: float,
        dfinal: Tensor | None,
        transition: tuple[Tensor, Tensor],
        segments: segmentation.Segments,
        dstate: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> delta.EntryStates:
        if exchange is not None:
            states = segment_launch.entry_dstates(terms, do, wy, scale, dfinal, segments, exchange)
            return delta.EntryStates(states, None, dstate)
        dE = segment_launch.segment_transition_bwd(terms, do, wy, scale, dfinal, segments)
        states = segment_launch.state_passing(
            terms, dE, *transition, dfinal, segments, reverse=True
        )
        return delta.EntryStates(states, transition, dstate)

    def fused_gradients(
        self, terms: LinearInputs, wy: delta.WYFactors, given: Cotangents
    ) -> dict[str, Tensor] | None:
        """Where the kernel's schedule has a place for it (bwd_schedule.py)."""
        do, _, dstate, scale, _, saved, exchange = given
        checkpoints = saved[3] if saved else None
        schedule = self._schedule(terms, exchange)
        if schedule is None:
            return None
        grads = self._empty_fused_grads(terms, do)
        if checkpoints is None:  # forward runs once more, for these alone
            checkpoints = bwd_schedule.empty_checkpoints(terms, schedule)
            ends = self.scan_ends(terms, wy, None, None if exchange is None else exchange.local)
            ends["checkpoints"] = delta.Checkpoints(schedule.interval, checkpoints)
            self.chunk_fwd(terms, wy, scale, grads["v"], **ends)
        ds_in = self._fused_entry_dstates(terms, wy, given, schedule.segments)
        args = terms, do, wy, scale, checkpoints, grads, schedule
        self.chunk_bwd(*args, s_in=ds_in, s_out=dstate)
        H = terms.q.shape[2]
        return grads | {name: inputs.sum_grouped_heads(grads[name], H) for name in "qk"}

    def _empty_fused_grads(self, terms: LinearInputs, do: Tensor) -> dict[str, Tensor]:
        """Memory for the gradients; that of v also holds w meanwhile."""
        B, T, HV = terms.v.shape[:3]
        heads, K = HV // self.heads_per_sum(terms), terms.q.shape[3]
        grads = {name: do.new_empty(B, T, heads, K) for name in "qk"}
        for name in ("beta", "g"):
            if getattr(terms, name) is not None:
                grads[name] = do.new_empty(B, T, HV, dtype=torch.float32)
        return grads | {"v": do.new_empty(do.shape)}

    def _fused_entry_dstates(
        self,
        terms: LinearInputs,
        wy: delta.WYFactors,
        given: Cotangents,
        segments: segmentation.Segments | None,
    ) -> Tensor | None:
        """The gradient of the state after each part that a program takes."""
        do, dfinal, _, scale, _, _, exchange = given
        if exchange is not None:
            cut = exchange.segments(terms, segments, segmentation.CHUNK)
            if cut is not None:
                ends = dfinal, cut, exchange
                dstates = segment_launch.entry_dstates(terms, do, wy, scale, *ends)
                return dfinal if segments is None else dstates
        elif segments is not None:
            made = segment_launch.segment_transition(terms, wy, None, segments, alone=True)
            dE = segment_launch.segment_transition_bwd(terms, do, wy, scale, dfinal, segments)
            return segment_launch.state_passing(terms, dE, *made, dfinal, segments, reverse=True)
        return dfinal

    def chunk_bwd(
        self,
        terms: LinearInputs,
        do: Tensor,
        wy: delta.WYFactors,
        scale: float,
        checkpoints: Tensor,
        grads: dict[str, Tensor],
        schedule: bwd_schedule.BackwardSchedule,
        *,
        s_in: Tensor | None,
        s_out: Tensor | None,
    ) -> None:
        """Into grads, which leaves the states of chunks in memory and nothing else: dv comes where
        w was.

        Args:
            checkpoints: the states before each part of a sequence, as forward left them.
            s_in: gradients of the states after sequences; those after segments, in float32, are
                overwritten.
        """
        HV, V = terms.v.shape[2:]
        K, heads = terms.q.shape[-1], grads["q"].shape[2]
        w, beta_gate = grads["v"], wy.beta_gate
        segments, programs = schedule.segments, schedule.programs(terms)
        workspaces = min(programs, MAX_WORKSPACES)
        semaphores = beta_gate.shape[0] * heads if heads < HV else 0
        states = w.new_empty(workspaces * max(schedule.interval - 2, 1), V, K)
        run: Any = launch_cache.cached(bwd_fused.delta_chunk_bwd_sm90_kernel)[(programs,)]
        run(
            q_desc=common.token_tiles(terms.q, K),
            k_desc=common.token_tiles(terms.k, K),
            v_desc=common.token_tiles(terms.v, V),
            do_desc=common.token_tiles(do, V),
            r_desc=common.token_tiles(wy.r, segmentation.CHUNK),
            dv_desc=common.token_tiles(w, V),
            states_desc=common.tma_descriptor(states, K, V, K),
            checkpoints_desc=common.tma_descriptor(checkpoints, K, V, K),
            dq_desc=common.token_tiles(grads["q"], K),
            dk_desc=common.token_tiles(grads["k"], K),
            dq_ptr=grads["q"],
            dk_ptr=grads["k"],
            dv_ptr=w,
            park_ptr=None if segments else beta_gate.new_empty(workspaces, V, K),
            beta_gates_ptr=beta_gate,
            dbeta_ptr=grads["beta"],
            dg_ptr=grads.get("g"),
            counts_ptr=w.new_zeros(workspaces + semaphores, dtype=torch.int32),
            scale=scale,
            G=HV // heads,
            every=schedule.interval,
            workspaces=workspaces,
            BK=segmentation.TMA_COLUMNS,
            C=segmentation.CHUNK,
            ST=2,
            WARPS=V // 16,
            GROUPED_HEADS=heads < HV,
            **delta.delta_args(terms, segments, s_in, s_out),
            **BWD_OPTIONS[V],
            **backends.FEWER_REGISTERS,
        )


BACKEND = Sm90Delta()
forward, backward = BACKEND.forward, BACKEND.backward
