"""The sm_90 kernels' sums, masks, rings and barriers, held against the oracle by numpy."""

import functools
from typing import Any

import pytest
import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from tests.gluon_emulator.threads import Descriptor, Pointer, kernel, launch
from tests.support.attention_calls import Call, check, incoming, want

_PATH = "slipstream.kernels.attention.sm90."
_LN2 = 0.6931471805599453
CALLS = [
    Call("one", T=1, S=1, H=1),
    Call("full", B=2, T=150, S=270, H=2, HKV=2),
    Call("causal", B=2, T=300, S=300, H=4, HKV=2, right=0),
    Call("more queries", T=300, S=90, right=0),
    Call("more keys", T=140, S=400, right=0),
    Call("narrow window", T=300, S=280, left=5, right=3),
    Call("wide window", T=300, S=300, left=150, right=0, softcap=5.0),
    Call("left alone", T=280, S=260, left=100, softcap=3.0),
    Call("packed", T=420, S=420, q_lengths=(5, 0, 200, 215), k_lengths=(5, 0, 200, 215), right=0),
    Call("packed apart", T=210, S=400, q_lengths=(5, 0, 65, 130, 10), k_lengths=(0, 70, 250, 80, 0),
         right=0, left=60),
    Call("used", B=3, T=130, S=300, used=(300, 9, 0), right=0),
    Call("capped, no mask", T=130, S=270, softcap=4.0),
]  # fmt: skip


@functools.cache
def found(name: str) -> Any:
    return kernel(_PATH + name)


WIDE = [CALLS[i] for i in (1, 2, 6, 9, 10)]


@pytest.mark.parametrize(
    ("call", "D"),
    [*((call, 16) for call in CALLS), *((call, 256) for call in WIDE)],
    ids=lambda x: str(getattr(x, "name", x)),
)
def test_kernels_match_reference(call: Call, D: int) -> None:
    call = Call(**{**vars(call), "D": D, "DV": D})
    terms, options = call.terms(torch.float64), call.options
    do, dlse = incoming(terms)
    right = want(terms, options, do, dlse)
    for programs in (1, 3):
        check(run(terms, options, do, dlse, programs), right, 1e-9, call.name)


@pytest.mark.parametrize("D", [16, 256])
def test_a_sequence_does_not_see_its_neighbours_nan(D: int) -> None:
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
        NC=2, BN=32, D=D, DV=DV, ST=2, ROOM=room, **flags(terms, options, extra),
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
    base[..., :T] = torch.where(lse == -torch.inf, torch.inf, lse / _LN2)
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


@pytest.mark.parametrize("call", [CALLS[i] for i in (0, 1, 2, 6, 8, 9, 10)], ids=lambda c: c.name)
def test_forward_of_two_widths(call: Call) -> None:
    forward_matches(Call(**{**vars(call), "D": 192, "DV": 128}), 1, 128)


def forward_matches(call: Call, room: int, extra: int) -> None:
    terms, options = call.terms(torch.float64), call.options
    right = want(terms, options, *incoming(terms))
    right = {name: right[name] for name in ("o", "lse")}
    for programs in (1, 3):
        check(forward(terms, options, programs, room, extra), right, 1e-9, call.name)


def desc(x: torch.Tensor, rows: int, width: int | None = None) -> Descriptor:
    return Descriptor(x.numpy().reshape(-1, x.shape[2] * x.shape[3]), (rows, width or x.shape[3]))


def at(x: torch.Tensor) -> tuple[int, int, int]:
    return x.shape[1], 0, x.shape[3]


def ptr(x: torch.Tensor | None) -> Pointer | None:
    return None if x is None else Pointer(x.numpy().reshape(-1))


def offsets(terms: AttentionInputs) -> tuple:
    return ptr(terms.cu_q), ptr(terms.cu_k), ptr(terms.lengths)


def factors(options: AttentionOptions) -> tuple[float, float]:
    if options.softcap == 0:
        return options.scale / _LN2, 0.0
    return 2 * options.scale / options.softcap / _LN2, options.softcap / _LN2


def sizes(
    terms: AttentionInputs, options: AttentionOptions, of_keys: bool, rows: int = 128
) -> tuple:
    q, k, N = terms.q, terms.k, terms.sequences
    T, S, H, HKV = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    total, cu, heads = (S, terms.cu_k, HKV) if of_keys else (T, terms.cu_q, H)
    tiles = -(-total // rows) if cu is None else total // rows + N
    pairs = heads if cu is not None else heads * N
    left, right = max(options.left, 0), max(options.right, 0)
    steps = (N - 1).bit_length()
    return T, S, H, N, H // HKV, tiles, steps, min(3, pairs), tiles * pairs, left, right


def flags(terms: AttentionInputs, options: AttentionOptions, extra: int = 0) -> dict[str, int]:
    extra |= 64 if terms.sinks is not None else 0
    given = (
        options.left >= 0,
        options.right >= 0,
        options.softcap != 0,
        terms.lengths is not None,
        terms.cu_q is not None,
        terms.cu_k is not None,
    )
    flags = sum(1 << i for i, x in enumerate(given) if x) + extra
    return {"FLAGS": flags, "CONSUMER": 0, "PRODUCER": 0}
