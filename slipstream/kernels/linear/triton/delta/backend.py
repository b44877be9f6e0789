"""The delta rule's stages by Triton kernels (kernels/linear/delta.py has their order)."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, delta, inputs, prefix_states
from slipstream.kernels.linear.plan import INTERPRETED
from slipstream.kernels.linear.segments import Segments, num_chunks, num_sequences, sequence_args
from slipstream.kernels.linear.triton.common.state_passing import state_passing
from slipstream.kernels.linear.triton.delta import chunk, dqkg, plan, solve_tril
from slipstream.runtime.backends import fp32_dot_precision
from slipstream.runtime.launch_cache import cached


class TritonDelta(delta.DeltaBackend):
    def chunk(self, terms: inputs.LinearInputs) -> int:
        return plan.tile_of(terms)[0].C

    def num_chunks(self, terms: inputs.LinearInputs) -> int:
        return num_chunks(terms, self.chunk(terms))

    def can_pass_states(self, terms: inputs.LinearInputs) -> bool:
        return plan.can_pass_states(terms)

    def choose_segments(self, terms: inputs.LinearInputs) -> Segments | None:
        return plan.choose_segments(terms)

    def solve_tril(self, terms: inputs.LinearInputs) -> delta.WYFactors:
        B, T, HV, _ = terms.v.shape
        H, K = terms.q.shape[2:]
        tile, _ = plan.tile_of(terms)
        exact = terms.q.dtype == torch.float32
        dtype = torch.float32 if plan.uses_split_bf16(terms) else terms.v.dtype
        r = terms.v.new_empty(B, T, HV, tile.C, dtype=dtype)
        # float32 has the sum of the gate in two parts, and p reads before the decay
        rows = 1 + (terms.g is not None) * (1 + exact + (terms.p is not None))
        beta_gate = r.new_empty(self.num_chunks(terms), HV, rows, tile.C, dtype=torch.float32)
        # R is rounded to the inputs' dtype: in 16 bits either is as good as float32
        inner = fp32_dot_precision() if exact else "halves" if tile.tma else "tf32"
        launch: Any = cached(solve_tril.delta_solve_tril_kernel)[(beta_gate.shape[0] * HV,)]
        launch(
            k_ptr=terms.k,
            p_ptr=terms.p,
            g_ptr=terms.g,
            beta_ptr=terms.beta,
            r_ptr=r,
            rows_ptr=beta_gate,
            **sequence_args(terms),
            H=H,
            K=K,
            BK=tile.solve.B,
            HAS_GATE=terms.g is not None,
            C=tile.C,
            LEVELS=(tile.C // solve_tril.BASE.value).bit_length() - 1,
            HAS_P=terms.p is not None,
            INNER="ieee" if INTERPRETED else inner,
            **plan.launch_options(terms, tile.solve),
        )
        return delta.WYFactors(r, beta_gate)

    def entry_states(
        self,
        terms: inputs.LinearInputs,
        wy: delta.WYFactors,
        segments: Segments,
        final: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> delta.EntryStates:
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        E = wy.beta_gate.new_empty(segments.count, HV, K, V)
        M = wy.beta_gate.new_empty(segments.count, HV, K, K)
        self.chunk_fwd(terms, wy, 1.0, None, s_out=E, m=M, segments=segments)
        state_passing(terms, segments, E, M, terms.initial_state, final, exchange=exchange)
        return delta.EntryStates(E, M, None)

    def entry_dstates(
        self,
        terms: inputs.LinearInputs,
        do: Tensor,
        wy: delta.WYFactors,
        scale: float,
        dfinal: Tensor | None,
        transition: Tensor,
        segments: Segments,
        dstate: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> delta.EntryStates:
        (HV, V), K = terms.v.shape[2:], terms.q.shape[-1]
        E = wy.beta_gate.new_empty(segments.count, HV, K, V)
        self.chunk_dstate(terms, do, wy, scale, s_out=E, segments=segments)
        ends = transition, dfinal, dstate
        state_passing(terms, segments, E, *ends, reverse=True, exchange=exchange)
        return delta.EntryStates(E, transition, None)

    def chunk_fwd(
        self,
        terms: inputs.LinearInputs,
        wy: delta.WYFactors,
        scale: float,
        out: Tensor | None,
        *,
        states: Tensor | None = None,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        m: Tensor | None = None,
        segments: Segments | None = None,
        checkpoints: delta.Checkpoints | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> None:
        """Or, with m, what each segment adds to the state, into s_out, and its transition M."""
        HV, V = terms.v.shape[2:]
        H, K = terms.q.shape[2:]
        tile, BK = plan.tile_of(terms)
        sequences = num_sequences(terms, segments)
        make = "ends" if m is not None else "o" if states is None else "states"
        kernel_tile = tile.fwd
        (q, k, p, v, r, out), tma = plan.tma_descriptor(
            terms,
            [terms.q if make == "o" else None, terms.k, terms.p, terms.v, wy.r, out],
            [BK, BK, BK, kernel_tile.B, tile.C, kernel_tile.B],
        )
        tiles = -(-V // kernel_tile.B) + (-(-K // kernel_tile.B) if make == "ends" else 0)
        launch: Any = cached(chunk.delta_chunk_fwd_kernel)[(tiles * HV * sequences,)]
        launch(
            q_ptr=q,
            k_ptr=k,
            p_ptr=p,
            v_ptr=v,
            rows_ptr=wy.beta_gate,
            r_ptr=r,
            o_ptr=out,
            states_ptr=plan.state_descriptor(states, kernel_tile.B, BK)
            if tma and states is not None
            else states,
            m_ptr=m,
            scale=scale,
            **delta.delta_args(terms, segments, s_in, s_out),
            BK=BK,
            BV=kernel_tile.B,
            C=tile.C,
            OUTPUT=make,
            HAS_P=terms.p is not None,
            GROUPED=H != HV,
            TMA=tma,
            SPLIT_BF16=plan.uses_split_bf16(terms),
            **(prefix.pointers() if prefix else prefix_states.NO_POINTERS),
            **plan.scan_options(terms, kernel_tile),
        )

    def chunk_dstate(
        self,
        terms: inputs.LinearInputs,
        do: Tensor,
        wy: delta.WYFactors,
        scale: float,
        dv: Tensor | None = None,
        dstates: Tensor | None = None,
        *,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        segments: Segments | None = None,
    ) -> None:
        (HV, V), H = terms.v.shape[2:], terms.q.shape[2]
        tile, BK = plan.tile_of(terms)
        sequences = num_sequences(terms, segments)
        kernel_tile = tile.dstate
        BV = kernel_tile.B
        (q, k, p, do, r, dv), tma = plan.tma_descriptor(
            terms, [terms.q, terms.k, terms.p, do, wy.r, dv], [BK, BK, BK, BV, tile.C, BV]
        )
        launch: Any = cached(chunk.delta_chunk_dstate_kernel)[(-(-V // BV) * HV * sequences,)]
        launch(
            q_ptr=q,
            k_ptr=k,
            p_ptr=p,
            do_ptr=do,
            rows_ptr=wy.beta_gate,
            r_ptr=r,
            dv_ptr=dv,
            states_ptr=plan.state_descriptor(dstates, BV, BK)
            if tma and dstates is not None
            else dstates,
            scale=scale,
            **delta.delta_args(terms, segments, s_in, s_out),
            BK=BK,
            BV=BV,
            C=tile.C,
            OUTPUT="ends" if dstates is None else "states",
            HAS_P=terms.p is not None,
            GROUPED=H != HV,
            TMA=tma,
            SPLIT_BF16=plan.uses_split_bf16(terms),
            **plan.scan_options(terms, kernel_tile),
        )

    def chunk_dqkg(
        self,
        terms: inputs.LinearInputs,
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
        tile, _ = plan.tile_of(terms)
        BK = tile.grads.B
        BV = min(64, BK)
        dp = grads.get("p")
        # with p rows of dv and dp are turned by a token, which no descriptor does
        (do, w, dv_rows, dq, dk), tma = plan.tma_descriptor(
            terms, [do, w, dv if dp is None else None, grads["q"], grads["k"]], [BV, BV, BV, BK, BK]
        )
        launch: Any = cached(dqkg.delta_dqkg_kernel)[(HV * states.shape[0],)]
        launch(
            **inputs.pointers(terms, "qkp"),
            do_ptr=do,
            w_ptr=w,
            dv_ptr=dv_rows if dp is None else dv,
            s_ptr=plan.state_descriptor(states, BV, BK) if tma else states,
            ds_ptr=plan.state_descriptor(dstates, BV, BK) if tma else dstates,
            dq_ptr=dq,
            dk_ptr=dk,
            dp_ptr=dp,
            rows_ptr=wy.beta_gate,
            dbeta_ptr=grads["beta"],
            dg_ptr=grads.get("g"),
            scale=scale,
            **sequence_args(terms),
            H=H,
            K=K,
            V=V,
            BK=BK,
            HAS_GATE=terms.g is not None,
            BV=BV,
            C=tile.C,
            HAS_P=terms.p is not None,
            GROUPED=H != HV,
            TMA=tma,
            **plan.launch_options(terms, tile.grads),
        )


BACKEND = TritonDelta()
forward, backward = BACKEND.forward, BACKEND.backward
