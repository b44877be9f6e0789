"""The sm_90 kernels' sums, masks, rings and barriers, held against the oracle by numpy."""

from typing import Any

import pytest
import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from tests.gluon_emulator.threads import launch
from tests.support import sm90_attention
from tests.support.attention_calls import Call, check, incoming, want
from tests.support.sm90_attention import CALLS, at, desc, factors, flags, found, offsets, ptr, sizes

WIDE = [CALLS[i] for i in (1, 2, 6, 9, 10)]


@pytest.mark.parametrize(
    ("call", "D"),
    [*((call, 16) for call in CALLS), *((call, 256) for call in WIDE)],
    ids=lambda x: str(getattr(x, "name", x)),
)
@pytest.mark.sample(which=lambda call, D: D == 16 or call.name in ("causal", "packed apart"))
def test_kernels_match_reference(call: Call, D: int) -> None:
    call = Call(**{**vars(call), "D": D, "DV": D})
    terms, options = call.terms(torch.float64), call.options
    do, dlse = incoming(terms)
    right = want(terms, options, do, dlse)
    for programs in (1, 3):
        check(run(terms, options, do, dlse, programs), right, 1e-9, call.name)


@pytest.mark.parametrize("D", [16, 256])
def test_packed_nan_stays_in_its_sequence(D: int) -> None:
    call = Call("pair", B=2, T=150, S=140, H=2, HKV=2, D=D, DV=D, right=0)
    terms, options = call.terms(torch.float64), call.options
    do, dlse = incoming(terms)
    alone = AttentionInputs(*(x[:1].clone() for x in terms[:3]))
    right = want(alone, options, do[:1].clone(), dlse[:1].clone())
    for x in (*terms[:3], do):
        x[1] = torch.nan
    found = run(terms, options, do, dlse, 2)
    check({name: x[:1] for name, x in found.items()}, right, 1e-9, call.name)


def forward(
    terms: AttentionInputs, options: AttentionOptions, programs: int, room: int = 1, extra: int = 0
) -> dict[str, Any]:
    q, k, v = terms[:3]
    B, T, H, D = q.shape
    DV = v.shape[-1]
    width = 64 if D == 192 else D
    o, lse = (torch.full((B, *x), torch.nan, dtype=q.dtype) for x in ((T, H, DV), (H, T)))
    counter = ptr(torch.zeros(1, dtype=torch.int32)) if extra & 128 else None
    launch(
        found("forward:softmax_fwd_sm90_kernel"), programs,
        (desc(q, 64, width), desc(k, 32, width), desc(v, 32), ptr(o), ptr(lse), ptr(terms.sinks),
         *offsets(terms),
         counter, *factors(options), *sizes(terms, options, False), *at(q),
         *at(k), *at(v)),
        NC=2, BN=32, D=D, DV=DV, ST=2, Q_STAGES=room, **flags(terms, options, extra),
    )  # fmt: skip
    return {"o": o, "lse": lse}


def run(
    terms: AttentionInputs, options: AttentionOptions, do: Any, dlse: Any, programs: int
) -> dict[str, Any]:
    q, k, v = terms[:3]
    B, T, H, D = q.shape
    o, lse = forward(terms, options, programs).values()
    room = -(-T // 4) * 4
    base, delta = torch.full((2, B, H, room), torch.nan, dtype=torch.float64)
    base[..., :T] = torch.where(lse == -torch.inf, torch.inf, lse / sm90_attention._LN2)
    delta[..., :T] = (o * do).sum(-1).transpose(1, 2) - dlse
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    rest = (*offsets(terms), *factors(options), options.scale)
    ats = (*at(q), *at(k), *at(v), *at(do))
    launch(
        found("bwd_dq:softmax_dq_sm90_kernel"), programs,
        (desc(q, 64), desc(k, 32), desc(v, 32), desc(do, 64), ptr(dq), ptr(base), ptr(delta), *rest,
         *sizes(terms, options, False), *ats),
        BN=32, D=D, KS=3, VS=2, **flags(terms, options),
    )  # fmt: skip
    launch(
        found("bwd_dkv:softmax_dkv_sm90_kernel"), programs,
        (desc(q, 32), desc(k, 64), desc(v, 64), desc(do, 32), ptr(dk), ptr(dv), ptr(base),
         ptr(delta), *rest, *sizes(terms, options, True, 64), *ats),
        BM=32, D=D, ST=2, **flags(terms, options),
    )  # fmt: skip
    return {"o": o, "lse": lse, "q": dq, "k": dk, "v": dv}


@pytest.mark.parametrize("extra", [0, 128])
@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.name)
@pytest.mark.sample(which=lambda call, room, extra: (room == 2) == (extra == 128))
def test_forward_ways(call: Call, room: int, extra: int) -> None:
    forward_matches(Call(**{**vars(call), "D": 16, "DV": 16}), room, extra)


@pytest.mark.parametrize("power", [-1, 1])
def test_forward_where_scores_grow(power: int) -> None:
    """By so much that sums are scaled anew, in some rows or tiles."""
    call = Call("grow", B=2, T=150, S=270, H=2, HKV=2, D=16, DV=16)
    terms, options = call.terms(torch.float64), call.options
    ramp = torch.linspace(0.5, 40, call.S, dtype=torch.float64)[:, None, None] ** power
    terms = terms._replace(k=terms.k * ramp)
    right = want(terms, options, *incoming(terms))
    check(forward(terms, options, 3), {name: right[name] for name in ("o", "lse")}, 1e-9, "grow")


def test_forward_with_sinks() -> None:
    for call in (CALLS[i] for i in (1, 2, 5, 9, 10)):
        forward_matches(
            Call(**{**vars(call), "D": 16, "DV": 16, "has": frozenset({"sinks"})}), 1, 0
        )


@pytest.mark.parametrize("call", CALLS[:3] + CALLS[4:11], ids=lambda c: c.name)
def test_forward_of_two_widths(call: Call) -> None:
    forward_matches(Call(**{**vars(call), "D": 192, "DV": 128}), 1, 128)


def forward_matches(call: Call, room: int, extra: int) -> None:
    terms, options = call.terms(torch.float64), call.options
    right = want(terms, options, *incoming(terms))
    right = {name: right[name] for name in ("o", "lse")}
    for programs in (1, 3):
        check(forward(terms, options, programs, room, extra), right, 1e-9, call.name)
