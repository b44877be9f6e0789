"""Calls that leave states on their way, and the same prefixes called one by one."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops
from slipstream.ops import PrefixStates

GRID = 64
OPERATORS = ("chunk_gated_delta_rule", "chunk_kda", "chunk_simple_gla", "chunk_gla", "chunk_rwkv7")


@dataclass
class Call:
    """places: row, first token and end of each sequence."""

    operator: str
    tensors: dict[str, Tensor]
    state: Tensor
    offsets: Tensor | None
    places: list[tuple[int, int, int]]
    prefix: PrefixStates
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        operator: str,
        lengths: tuple[int, ...] | None,
        *,
        B: int = 2,
        T: int = 200,
        H: int = 1,
        HV: int = 2,
        K: int = 16,
        V: int = 24,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        **options: Any,
    ) -> "Call":
        """A call of packed lengths, or B of T tokens. About two thirds of the grid are listed, and
        all places past a sequence's end."""
        torch.manual_seed(seed)
        N, H = B, HV if operator == "chunk_rwkv7" else H
        V = K if operator == "chunk_rwkv7" else V
        places = [(n, 0, T) for n in range(B)]
        if lengths is not None:
            ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
            B, T, N = 1, ends[-1], len(lengths)
            places = [(0, *x) for x in pairwise(ends)]
        q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1) for _ in range(2))
        v = torch.randn(B, T, HV, V)
        by_token, by_channel = -0.2 * torch.rand(B, T, HV), -0.2 * torch.rand(B, T, HV, K)
        beta = torch.rand(B, T, HV)
        given = {
            "chunk_gated_delta_rule": {"q": q, "k": k, "v": v, "g": by_token, "beta": beta},
            "chunk_kda": {"q": q, "k": k, "v": v, "g": by_channel, "beta": beta},
            "chunk_simple_gla": {"q": q, "k": k, "v": v, "g": by_token},
            "chunk_gla": {"q": q, "k": k, "v": v, "g": by_channel},
            "chunk_rwkv7": {"r": q, "w": by_channel, "k": k, "v": v, "a": -k, "b": k * 0.5},
        }[operator]
        gates = () if operator in ("chunk_gla", "chunk_rwkv7") else ("g", "beta")
        tensors = {n: x if n in gates else x.to(dtype) for n, x in given.items()}
        tensors = {n: x.to(device) for n, x in tensors.items()}
        wanted = torch.rand(N, -(-T // GRID)) < 0.66
        whole = torch.tensor([(end - begin) // GRID for _, begin, end in places])
        wanted &= torch.arange(wanted.shape[1]) < whole[:, None]
        count = int(wanted.sum())
        rows = torch.full(wanted.shape, -1, dtype=torch.int32)
        order = torch.randperm(count + 3).int()
        rows[wanted] = order[:count]
        rows[torch.arange(wanted.shape[1]) >= whole[:, None]] = order[count]  # is not written
        pool = torch.full((count + 3, HV, V, K), torch.nan, device=device)
        offsets = None
        if lengths is not None:
            offsets = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        state = torch.randn(N, HV, K, V).to(device)
        return cls(
            operator, tensors, state, offsets, places, PrefixStates(pool, rows.to(device)), options
        )

    def arguments(self) -> dict[str, Any]:
        ends = {"initial_state": self.state, "output_final_state": True}
        more = {"cu_seqlens": self.offsets, "prefix_states": self.prefix}
        return {**self.tensors, **ends, **more, **self.options}

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """o, the pool and the final states."""
        with torch.no_grad():
            o, final = getattr(ops, self.operator)(**self.arguments())
        return o, self.prefix.pool, final


def one_by_one(call: Call) -> tuple[Tensor, dict[int, Tensor], Tensor]:
    """o, states by row of the pool [HV, V, K], and final states, of a call for every piece."""
    prefixes, outputs, finals = {}, [], []
    for n, (row, begin, end) in enumerate(call.places):
        state, parts = call.state[n : n + 1], []
        rows = call.prefix.rows[n].tolist()
        for at in range(begin, max(end, begin + 1), GRID):
            stop = min(at + GRID, end)
            piece = {name: x[row : row + 1, at:stop] for name, x in call.tensors.items()}
            with torch.no_grad():
                # no back end is asked for no tokens
                options = call.options if stop > at else {**call.options, "impl": None}
                o, state = getattr(ops, call.operator)(
                    **piece, initial_state=state, output_final_state=True, **options
                )
            parts.append(o)
            to = rows[(at - begin) // GRID] if stop - at == GRID else -1
            if to >= 0:
                prefixes[to] = state[0].mT
        outputs.append(torch.cat(parts, 1))
        finals.append(state)
    return torch.cat(outputs, 0 if call.offsets is None else 1), prefixes, torch.cat(finals)


def expect_prefix_states(call: Call, rtol: float) -> None:
    """Near what calls for every piece give; nothing else in the pool is written."""
    o, pool, final = call.run()
    want, prefixes, ends = one_by_one(call)
    close: dict[str, Any] = {"rtol": rtol, "atol": rtol}
    torch.testing.assert_close(o[:, : want.shape[1]], want, **close)
    torch.testing.assert_close(final, ends, **close)
    assert prefixes
    for row in range(pool.shape[0]):
        if row in prefixes:
            torch.testing.assert_close(pool[row], prefixes[row], **close)
        else:
            assert pool[row].isnan().all(), row
