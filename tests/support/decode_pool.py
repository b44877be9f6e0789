"""Steps of recurrences whose states lie in a pool."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from slipstream.ops.steps import recurrent_step
from tests.support.operators import offsets

B, H, HV, K, V = 3, 1, 2, 20, 33

SLOTS = 7

INDICES = (4, -1, 2)

# tokens of a batch, or of each packed sequence
TOKENS = (1, 3, (1, 1, 1), (2, 0, 2))

KINDS = {
    "linear_attn": (),
    "retention": ("g",),
    "gla": ("gk",),
    "gla both": ("gk", "gv"),
    "rwkv6": ("gk", "u"),
    "gated_delta_rule": ("g", "beta"),
    "kda": ("gk", "beta"),
    "comba": ("g", "beta", "p"),
    "rwkv7": ("gk", "a", "b"),
    "all": ("gk", "gv", "beta wide", "p", "a", "b", "u"),
}


def make(kind: str, tokens: Any, dtype: torch.dtype = torch.float32) -> LinearInputs:
    lengths = tokens if isinstance(tokens, tuple) else None
    rows: Any = (1, sum(lengths)) if lengths else (B, tokens)
    made: dict[str, Any] = {
        "g": lambda: -torch.rand(*rows, HV),
        "gk": lambda: -50 * torch.rand(*rows, HV, K).square(),
        "gv": lambda: -torch.rand(*rows, HV, V),
        "beta": lambda: 2 * torch.rand(*rows, HV),
        "beta wide": lambda: 2 * torch.rand(*rows, HV, V),
        "u": lambda: torch.randn(HV, K),
        **{x: lambda: torch.randn(*rows, H, K).to(dtype) / K**0.5 for x in "pab"},
    }
    q, k = (torch.randn(*rows, H, K).to(dtype) for _ in range(2))
    names = {"gk": "g", "beta wide": "beta"}
    given: dict[str, Any] = {names.get(x) or x: made[x]() for x in KINDS[kind]}
    return LinearInputs(
        q,
        k / K**0.5,
        torch.randn(*rows, HV, V).to(dtype),
        cu_seqlens=offsets(lengths).int() if lengths else None,
        **given,
    )


def step(terms: LinearInputs, state: Tensor, **options: Any) -> Tensor:
    given = terms._asdict()
    for name in ("initial_state", "erase", "write"):
        assert given.pop(name) is None
    return recurrent_step(**given, state=state, **options)


def expected(terms: LinearInputs, pool: Tensor, indices: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """o and the pool [slots, HV, K, V] afterwards, in float64."""
    wide: dict[str, Any] = {n: x if x is None else x.double() for n, x in terms._asdict().items()}
    wide["cu_seqlens"] = terms.cu_seqlens
    at = torch.tensor(indices)
    start = pool.double()[at.clamp(min=0)]
    o, final = linear_reference(LinearInputs(**wide)._replace(initial_state=start), 0.3)
    after = pool.double().clone()
    after[at[at >= 0]] = final[at >= 0]
    cu = terms.cu_seqlens
    for n in (at < 0).nonzero()[:, 0].tolist():
        place = o[n] if cu is None else o[0, int(cu[n]) : int(cu[n + 1])]
        place.zero_()
    return o, after
