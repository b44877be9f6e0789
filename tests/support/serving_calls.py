"""Calls as engines make them, and what they come to token by token."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# sequences, heads of q and of v, channels, blocks of the pool, drafts
N, H, HV, K, V, SLOTS, T = 3, 1, 2, 16, 32, 9, 3


@dataclass
class Call:
    """Packed tokens with raw gates a and b, and a pool [SLOTS, HV, V, K] with a stride of its own.
    slots: of each sequence, or with drafts of each of its tokens. buffer: where drafts' states
    go."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    states: Tensor
    slots: Tensor
    offsets: Tensor
    is_kda: bool
    buffer: Tensor | None = None
    rows: Tensor | None = None
    accepted: Tensor | None = None
    null: int = -1
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(cls, lengths: list[int], slots: Tensor, is_kda: bool, dtype: Any = None) -> "Call":
        generator = torch.Generator(torch.get_default_device()).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        total, gates = sum(lengths), HV * (K if is_kda else 1)
        pool = normal(SLOTS, 2, HV, V, K)[:, 0]
        return cls(
            q=normal(1, total, H, K).to(dtype),
            k=normal(1, total, H, K).to(dtype),
            v=normal(1, total, HV, V).to(dtype),
            a=normal(total, gates),
            b=normal(total, HV),
            A_log=normal(HV),
            dt_bias=normal(gates),
            states=pool,
            slots=slots,
            offsets=torch.tensor([0, *lengths]).cumsum(0).int(),
            is_kda=is_kda,
        )

    @classmethod
    def decode(cls, is_kda: bool, first_null: int = 0) -> "Call":
        """One token each, of which the second has no slot: -1, or block 0 if first_null."""
        null = 0 if first_null else -1
        call = cls.make([1] * N, torch.tensor([5, null, 2], dtype=torch.int32), is_kda)
        call.null = null
        return call

    @classmethod
    def verify(cls, is_kda: bool) -> "Call":
        """SGLang's: states of drafts go to a buffer of rows."""
        call = cls.make([T] * N, torch.tensor([5, 1, 2], dtype=torch.int32), is_kda)
        call.buffer = torch.zeros(N + 1, T, HV, V, K)
        call.rows = torch.tensor([2, 0, 1], dtype=torch.int32)
        return call

    @classmethod
    def drafts(cls, is_kda: bool) -> "Call":
        """vLLM's: a block for each draft, of which the one accepted last is where they begin."""
        slots = torch.tensor([[5, 1, 2], [3, 4, 6], [7, 8, 0]], dtype=torch.int32)
        call = cls.make([T, T, 2], slots, is_kda)
        call.accepted, call.null = torch.tensor([2, 1, 1], dtype=torch.int32), 0
        return call

    @classmethod
    def prefill(cls, is_kda: bool, dtype: Any = torch.float32) -> "Call":
        return cls.make([70, 5, 64], torch.tensor([5, 1, 2], dtype=torch.int32), is_kda, dtype)

    def valid_rows(self, tokens: int) -> Tensor:
        """Packed tokens that have a slot."""
        if self.slots.dim() > 1:
            return torch.ones(tokens, dtype=torch.bool)
        return (self.slots != self.null).repeat_interleave(self.offsets.diff())

    def sglang(self) -> dict[str, Any]:
        given = {n: getattr(self, n) for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
        pool = {"ssm_states": self.states, "cache_indices": self.slots}
        return {**given, **pool, "query_start_loc": self.offsets}

    def sglang_function(self) -> dict[str, Any]:
        given = {n: getattr(self, n) for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
        pool = {"initial_state_source": self.states, "initial_state_indices": self.slots}
        fixed = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True}
        return {**given, **pool, **fixed, "cu_seqlens": self.offsets}

    def sglang_verify(self) -> dict[str, Any]:
        return {
            "intermediate_states_buffer": self.buffer,
            "intermediate_state_indices": self.rows,
            "cache_steps": T,
            "retrieve_parent_token": None,
        }

    def sglang_prefill(self) -> dict[str, Any]:
        """With the gates made: g and beta."""
        g, beta = self.gates()
        return {
            **{n: getattr(self, n) for n in ("q", "k", "v")},
            "g": g[None],
            "beta": beta[None],
            "ssm_states": self.states,
            "cache_indices": self.slots,
            "query_start_loc": self.offsets,
        }

    def vllm(self) -> dict[str, Any]:
        given = {n: getattr(self, n) for n in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
        pool = {"initial_state": self.states, "ssm_state_indices": self.slots}
        more = {"cu_seqlens": self.offsets, "num_accepted_tokens": self.accepted}
        more["use_qk_l2norm_in_kernel"] = True
        return {**given, **pool, **more}

    def gates(self, lower_bound: float | None = None) -> tuple[Tensor, Tensor]:
        """The log decay [total, HV] or [total, HV, K], and beta [total, HV]."""
        a = self.a + self.dt_bias
        rate = self.A_log.exp()
        if self.is_kda:
            a, rate = a.unflatten(-1, (HV, K)), rate[:, None]
        g = -rate * F.softplus(a) if lower_bound is None else lower_bound * (rate * a).sigmoid()
        return g, self.b.sigmoid()

    def expected(self, lower_bound: float | None = None) -> tuple[Tensor, list[list[Tensor]]]:
        """o [1, total, HV, V], and of each sequence the states [HV, V, K] after its tokens."""
        g, beta = self.gates(lower_bound)
        q, k = (F.normalize(x[0].double(), dim=-1, eps=1e-6) for x in (self.q, self.k))
        q, k, v = q.expand(-1, HV, -1) * K**-0.5, k.expand(-1, HV, -1), self.v[0].double()
        outputs, states = [], []
        for n in range(N):
            S = self.first_state(n).double()
            states.append([S])
            for t in range(int(self.offsets[n]), int(self.offsets[n + 1])):
                decay = g[t].double().exp()
                S = S * (decay[:, None] if self.is_kda else decay[:, None, None])
                read = (S @ k[t][..., None])[..., 0]
                x = beta[t].double()[:, None] * (v[t] - read)
                S = S + x[..., None] * k[t][:, None]
                outputs.append((S @ q[t][..., None])[..., 0])
                states[n].append(S)
        return torch.stack(outputs)[None], states

    def first_state(self, n: int) -> Tensor:
        slot = self.slots[n]
        if self.accepted is not None:
            slot = slot[self.accepted[n] - 1]
        elif slot.dim():
            slot = slot[0]
        return self.states[int(slot)].clone() if int(slot) != self.null else torch.zeros(HV, V, K)
