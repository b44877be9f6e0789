"""The delta rule in chunks: the order of its stages, for every back end.

    solve_tril     the WY factors of each chunk, R = (I + beta tril(K K^T))^-1
    chunk_fwd      carries the state from chunk to chunk, and writes o
    chunk_dstate   carries the state's gradient from the last chunk to the first, and writes dv
    chunk_dqkg     all other gradients, of all chunks at once, from the states and their gradients

Backward takes R from forward, or solves again, and has chunk_fwd write for each chunk and head the
state S and w, the values that the chunk writes under its keys. At C = 64 and K = V = 128 in 16 bits
S is 32 KB and a chunk of w 16 KB; without S the gradients' kernel, which is parallel over chunks,
would have to go from chunk to chunk too. Memory beyond results, in tensors of the size of v: R is
C / V of one; w one, S and its gradients K / C each; with grouped heads the gradients of q, k and p
for each value head; for segments two states of each.

Nothing here waits for the device, nor depends on values there.
"""

from abc import abstractmethod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from slipstream.kernels.linear import backend, inputs, prefix_states
from slipstream.kernels.linear.segments import Segments, scan_args
from slipstream.runtime.backends import device_of


class WYFactors(NamedTuple):
    """The factors of the WY representation of all chunks.

    Attributes:
        r: the inverse [B, T, HV, C].
        beta_gate: beta and, with a gate, its sum since the chunk's beginning, in two parts for
            float32, and with p exp of the sum up to the token before [chunks, HV, 1 to 4, C].
        transition_lognorm: with a gate, how far a chunk's transition decays, by blocks of tokens
            [chunks, HV, C / 16]; only sm_90's.
    """

    r: Tensor
    beta_gate: Tensor
    transition_lognorm: Tensor | None = None


class EntryStates(NamedTuple):
    """The states at the beginning of segments.

    Attributes:
        states: the state, or its gradient, that each segment meets [segments, HV, K, V].
        transition: M, as entry_dstates wants it.
        end: where chunk_fwd or chunk_dstate still has to write what a sequence ends with.
    """

    states: Tensor
    transition: Any
    end: Tensor | None


class Checkpoints(NamedTuple):
    """States that chunk_fwd leaves for backward, one before every `interval` chunks."""

    interval: int
    states: Tensor


class DeltaBackend(inputs.ChunkBackend):
    """A back end's stages. Tensors are contiguous; what is written is allocated by the caller."""

    # Whether chunk_dqkg reads its own part of w, and of q, before it writes there: then a gradient
    # takes w's memory.
    reuses_w = False

    @abstractmethod
    def solve_tril(self, terms: inputs.LinearInputs) -> WYFactors: ...

    @abstractmethod
    def chunk_fwd(
        self,
        terms: inputs.LinearInputs,
        wy: WYFactors,
        scale: float,
        out: Tensor,
        *,
        states: Tensor | None = None,
        s_in: Tensor | None = None,
        s_out: Tensor | None = None,
        segments: Segments | None = None,
        checkpoints: Checkpoints | None = None,
        prefix: prefix_states.PrefixStates | None = None,
    ) -> None:
        """Into out: o, or w if states [chunks, HV, V, K] are wanted, the state before each chunk.
        s_in, s_out: the states before and after sequences; s_in those before segments, if cut."""

    @abstractmethod
    def chunk_dstate(
        self,
        terms: inputs.LinearInputs,
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
        """Into dv, and into dstates the gradient of the state after each chunk. s_in is the
        gradient of the state at the end, s_out that of the state at the beginning."""

    @abstractmethod
    def chunk_dqkg(
        self,
        terms: inputs.LinearInputs,
        do: Tensor,
        wy: WYFactors,
        w: Tensor,
        dv: Tensor,
        states: Tensor,
        dstates: Tensor,
        scale: float,
        grads: dict[str, Tensor],
    ) -> None:
        """Into grads: q, k and p [B, T, HV / heads_per_sum, K], beta and g [B, T, HV] float32."""

    @abstractmethod
    def choose_segments(self, terms: inputs.LinearInputs) -> Segments | None: ...

    @abstractmethod
    def entry_states(
        self,
        terms: inputs.LinearInputs,
        wy: WYFactors,
        segments: Segments,
        final: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> EntryStates: ...

    @abstractmethod
    def entry_dstates(
        self,
        terms: inputs.LinearInputs,
        do: Tensor,
        wy: WYFactors,
        scale: float,
        dfinal: Tensor | None,
        transition: Any,
        segments: Segments,
        dstate: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> EntryStates: ...

    @abstractmethod
    def num_chunks(self, terms: inputs.LinearInputs) -> int:
        """Chunks of all sequences, at most."""

    def heads_per_sum(self, terms: inputs.LinearInputs) -> int:
        """Value heads that share q and k whose gradients chunk_dqkg adds up."""
        return 1

    def to_kernel_layout(self, terms: inputs.LinearInputs) -> inputs.LinearInputs:
        """Everything as the kernels index it."""
        assert terms.beta is not None
        return inputs.contiguous(terms)._replace(
            p=None if terms.p is None else self.contiguous(terms.p),
            g=None if terms.g is None else self.contiguous(terms.g),
            beta=terms.beta.contiguous(),
        )

    def empty_checkpoints(
        self, terms: inputs.LinearInputs, exchange: backend.Exchange | None
    ) -> Checkpoints | None:
        """Memory for the states that forward leaves for backward, if that wants them."""
        return None

    def fuses(self, terms: inputs.LinearInputs) -> bool:
        """Whether chunk_fwd of whole sequences wants no WY factors."""
        return False

    def forward(
        self,
        terms: inputs.LinearInputs,
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
            checkpoints = self.empty_checkpoints(terms, exchange) if save else None
            alone = not save and exchange is None and prefix is None and self.fuses(terms)
            wy = cast(WYFactors, None) if alone else self.solve_tril(terms)
            ends = self.scan_ends(terms, wy, final, exchange)
            self.chunk_fwd(terms, wy, scale, o, **ends, checkpoints=checkpoints, prefix=prefix)
            if save and self.saves:
                return o, final, *backend.SavedWY(*wy, checkpoints.states if checkpoints else None)
        return o, final

    def scan_ends(
        self,
        terms: inputs.LinearInputs,
        wy: WYFactors,
        final: Tensor | None,
        exchange: backend.Exchange | None = None,
    ) -> dict[str, Any]:
        """Segments, and the states that chunk_fwd begins and ends with, by its arguments' names."""
        segments = self.choose_segments(terms)
        if exchange is not None:
            segments = self.agree(terms, segments, exchange)
        s_in = terms.initial_state
        if segments is not None:
            s_in, _, final = self.entry_states(terms, wy, segments, final, exchange)
        return {"segments": segments, "s_in": s_in, "s_out": final}

    def fused_gradients(
        self, terms: inputs.LinearInputs, wy: WYFactors, given: inputs.Cotangents
    ) -> dict[str, Tensor] | None:
        """As staged_gradients, in one kernel; None where a call is better cut into the stages."""
        return None

    def gradients(self, terms: inputs.LinearInputs, given: inputs.Cotangents) -> dict[str, Tensor]:
        saved = given.saved
        wy = WYFactors(*saved[:3]) if saved else self.solve_tril(terms)
        grads = self.fused_gradients(terms, wy, given)
        return grads or self.staged_gradients(terms, wy, given)

    def staged_gradients(
        self, terms: inputs.LinearInputs, wy: WYFactors, given: inputs.Cotangents
    ) -> dict[str, Tensor]:
        do, dfinal, dstate, scale, _, _, exchange = given
        segments = self.choose_segments(terms)
        if exchange is not None:
            segments = self.agree(terms, segments, exchange)
        s_in, ds_in, ds_out = terms.initial_state, dfinal, dstate
        if segments is not None:
            local = None if exchange is None else exchange.local
            s_in, M, _ = self.entry_states(terms, wy, segments, None, local)
            args = scale, dfinal, M, segments, dstate, exchange
            ds_in, _, ds_out = self.entry_dstates(terms, do, wy, *args)
            del M, args
        w, dv = (do.new_empty(do.shape) for _ in range(2))
        K, (HV, V) = terms.q.shape[-1], terms.v.shape[2:]
        states, dstates = (terms.v.new_empty(self.num_chunks(terms), HV, V, K) for _ in range(2))
        self.chunk_fwd(terms, wy, scale, w, states=states, s_in=s_in, segments=segments)
        ends = {"s_in": ds_in, "s_out": ds_out, "segments": segments}
        self.chunk_dstate(terms, do, wy, scale, dv, dstates, **ends)
        grads = self._empty_grads(terms, do, w)
        self.chunk_dqkg(terms, do, wy, w, dv, states, dstates, scale, grads)
        for name in grads.keys() & {"q", "k", "p"}:
            grads[name] = inputs.sum_grouped_heads(grads[name], terms.q.shape[2])
        return {**grads, "v": dv}

    def _empty_grads(self, terms: inputs.LinearInputs, do: Tensor, w: Tensor) -> dict[str, Tensor]:
        """Memory for what chunk_dqkg writes."""
        B, T, HV = terms.v.shape[:3]
        H, K = terms.q.shape[2:]
        heads = HV // self.heads_per_sum(terms)
        memory = {}
        if self.reuses_w and heads == HV and w.shape[-1] == K:
            memory["k" if H == HV else "q"] = w
        names = [name for name in "qkp" if getattr(terms, name) is not None]
        grads = {n: memory[n] if n in memory else do.new_empty(B, T, heads, K) for n in names}
        for name in ("beta", "g"):
            if getattr(terms, name) is not None:
                grads[name] = do.new_empty(B, T, HV, dtype=torch.float32)
        return grads


def delta_args(
    terms: inputs.LinearInputs, segments: Segments | None, s_in: Tensor | None, s_out: Tensor | None
) -> dict[str, Any]:
    """Arguments of every kernel that goes from chunk to chunk."""
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    sizes = {"H": terms.q.shape[2], "K": K, "V": V}
    return sizes | scan_args(terms, segments, s_in, s_out)
