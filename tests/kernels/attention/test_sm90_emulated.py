"""The sm_90 kernels' sums, masks, rings and barriers, the fused backward's and those over a cache
of latents too, held against the oracle by numpy."""

import functools
from typing import Any

import pytest
import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.latent import eager_latent_attention
from slipstream.kernels.elementwise.rotary import rotary_reference
from tests.gluon_emulator.threads import Descriptor, Pointer, kernel, launch, launch_together
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
    width, columns, stages = {192: 64, 512: 128}.get(D, D), min(DV, 256), 1 if D == 512 else 2
    o, lse = (torch.full((B, *x), torch.nan, dtype=q.dtype) for x in ((T, H, DV), (H, T)))
    for first in range(0, DV, columns):
        counter = ptr(torch.zeros(1, dtype=torch.int32)) if extra & 128 else None
        values = v[..., first : first + columns].contiguous()
        launch(
            found("forward:softmax_fwd_sm90_kernel"), programs,
            (desc(q, 64, width), desc(k, 32, width), desc(values, 32), ptr(o) + first, ptr(lse),
             ptr(terms.sinks), *offsets(terms),
             counter, *factors(options), *sizes(terms, options, False), *at(q),
             *at(k), *at(values)),
            NC=2, BN=32, D=D, DV=columns, PITCH=DV, ST=stages, Q_STAGES=room,
            **flags(terms, options, extra),
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


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.name)
@pytest.mark.sample(which=lambda call: call.name in ("causal", "packed apart"))
def test_forward_of_halves_of_values(call: Call) -> None:
    """Heads of 512: panels of keys come one by one, and values in two launches."""
    has = frozenset({"sinks"} if call.right == 0 else ())
    forward_matches(Call(**{**vars(call), "D": 512, "DV": 512, "has": has}), 1, 128)


def forward_matches(call: Call, room: int, extra: int) -> None:
    terms, options = call.terms(torch.float64), call.options
    right = want(terms, options, *incoming(terms))
    right = {name: right[name] for name in ("o", "lse")}
    for programs in (1, 3):
        check(forward(terms, options, programs, room, extra), right, 1e-9, call.name)


_LN2 = 0.6931471805599453
TAKEN = [
    *CALLS,
    Call("keys without queries", T=70, S=700, q_lengths=(0, 70), k_lengths=(300, 400), right=0),
    Call("behind the window", T=100, S=700, left=30, right=10),
    Call("ahead", T=200, S=300, H=2, HKV=1, right=70),
    Call("capped", T=260, S=260, right=0, softcap=4.0),
]


@pytest.mark.parametrize(
    ("call", "D"),
    [(call, D) for call in TAKEN for D in (16, 64, 128) if D < 128 or call.softcap],
    ids=lambda x: str(getattr(x, "name", x)),
)
def test_fused_backward_matches_reference(call: Call, D: int) -> None:
    call = Call(**{**vars(call), "D": D, "DV": D})
    terms, options = call.terms(torch.float64), call.options
    do, dlse = incoming(terms)
    right = want(terms, options, do, dlse)
    grads = fused(terms, options, right, do, dlse)
    check(grads, {name: right[name] for name in grads}, 1e-9, call.name)


@pytest.mark.parametrize("rows", [1, None], ids=["one table", "tables of each row"])
@pytest.mark.parametrize("call", [x for x in TAKEN if x.T == x.S and x.used is None])
def test_keys_are_rotated_back(call: Call, rows: int | None) -> None:
    """Gradients of keys and values, as heads of one tensor, of keys before a rotary embedding."""
    D = 64
    call = Call(**{**vars(call), "D": D, "DV": D})
    terms, options = call.terms(torch.float64), call.options
    do, dlse = incoming(terms)
    right = want(terms, options, do, dlse)
    angles = torch.rand(rows or terms.k.shape[0], call.S, D // 2, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    grads = fused(terms, options, right, do, dlse, tables)
    cos, sin = (x[:, :, None] for x in tables)
    right["k"] = rotary_reference(right["k"], cos, -sin, False)
    check(grads, {name: right[name] for name in grads}, 1e-9, call.name)


def fused(
    terms: AttentionInputs,
    options: AttentionOptions,
    right: dict,
    do: Any,
    dlse: Any,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, Any]:
    q, k, v = terms[:3]
    B, T, H, D = q.shape
    o, lse = right["o"], right["lse"]
    dk, dv = (torch.full_like(x, torch.nan) for x in (k, v))
    given, to_dk, to_dv = {}, ptr(dk), ptr(dv)
    if tables is not None:
        HKV = k.shape[2]
        whole = torch.full((*k.shape[:2], H + 2 * HKV, D), torch.nan).double()
        _, dk, dv = whole.split([H, HKV, HKV], 2)
        to_dk, to_dv = (ptr(whole) + n * D for n in (H, H + HKV))
        cos, sin = tables
        given = {"cos_ptr": ptr(cos), "sin_ptr": ptr(sin)}
        given |= {"table_rows": T if cos.shape[0] > 1 else 0}
    N, cu = terms.sequences, terms.cu_q
    tiles = -(-T // 64) if cu is None else T // 64 + N
    sums = torch.full((B * H * tiles, 64, D), torch.nan).double()
    turns = torch.zeros(B * H * tiles, dtype=torch.int32)
    # each sequence in tiles of its own
    begins = [0] if cu is None else cu.tolist()
    lengths = [T] if cu is None else cu.diff().tolist()
    places = [begin // 64 * 64 + 64 * n for n, begin in enumerate(begins)]
    base = torch.full((B, H, tiles * 64), torch.inf).double()
    delta = torch.zeros_like(base)
    of_rows = torch.where(lse == -torch.inf, torch.inf, lse / _LN2)
    for begin, length, to in zip(begins, lengths, places):
        base[..., to : to + length] = of_rows[..., begin : begin + length]
        part = ((o * do).sum(-1).transpose(1, 2) - dlse)[..., begin : begin + length]
        delta[..., to : to + length] = part
    rows = [Descriptor(x.numpy().reshape(-1), (64,)) for x in (base, delta)]
    dq = Descriptor(sums.numpy().reshape(-1, D), (64, D // 2))
    launch_together(
        found("bwd_fused:softmax_bwd_sm90_kernel"), sizes(terms, options, True)[8],
        (desc(q, 64), desc(k, 128), desc(v, 128), desc(do, 64), *rows, dq, ptr(turns), to_dk,
         to_dv, *offsets(terms), *factors(options), options.scale, *sizes(terms, options, True),
         *at(q), *at(k), *at(v), *at(do)),
        BM=64, D=D, ST=2, **flags(terms, options), **given,
    )  # fmt: skip
    sums = torch.where(turns[:, None, None] > 0, sums * options.scale, 0.0).view(B, H, -1, D)
    parts = [sums[:, :, to : to + length] for length, to in zip(lengths, places)]
    return {"q": torch.cat(parts, 2).transpose(1, 2), "k": dk, "v": dv}


_NAME = "slipstream.kernels.attention.sm90.decode_latent:softmax_latent_decode_sm90_kernel"
_LN2_LATENT = 0.6931471805599453


@functools.cache
def found_latent() -> Any:
    return kernel(_NAME)


@pytest.mark.parametrize(
    ("page", "missing"), [(0, None), (64, None), (128, None), (64, -1), (128, 10**6)]
)
@pytest.mark.parametrize(("T", "H", "shares"), [(1, 7, 2), (3, 30, 1), (1, 128, 3)])
def test_latent_kernel_matches_plain_torch(
    T: int, H: int, shares: int, page: int, missing: int | None
) -> None:
    B, S = 3, 384
    q = torch.randn(B, T, H, 576, dtype=torch.float64)
    latent = torch.randn(B * S, 576, dtype=torch.float64)
    table = torch.randperm(B * S // page).int().view(B, -1) if page else None
    if table is not None and missing is not None:  # a page in use, and all of the only one's
        table[0, 1] = table[1] = missing
    cache = latent.view(-1, page or S, 576)
    lengths = torch.tensor([S, 1, 177], dtype=torch.int32)
    o, lse = eager_latent_attention(q, cache, lengths, table, 512, 0.05)
    parts = torch.full((shares, B, T, H, 512), torch.nan, dtype=torch.float64)
    lses = torch.full((shares, B, H, T), torch.nan, dtype=torch.float64)
    rows = q.view(-1, 576)
    tiles = -(-T * H // 64)
    descs = [Descriptor(x.numpy(), (64, w)) for x in (rows, latent) for w in (256, 64)]
    table_ptr = None if table is None else Pointer(table.numpy().reshape(-1))
    launch(
        found_latent(),
        tiles * shares * B,
        (
            *descs,
            *(Pointer(x.numpy().reshape(-1)) for x in (parts, lses, lengths)),
            table_ptr,
            0.05 / _LN2_LATENT,
            T,
            H,
            B,
            tiles,
            shares,
            S,
            S // (page or S),
            S,
        ),
        PAGE=page,
        HAS_LENGTHS=True,
    )
    lses *= _LN2_LATENT
    whole = lses.logsumexp(0)
    torch.testing.assert_close(whole, lse, rtol=1e-9, atol=1e-9)
    weights = torch.where(whole.isfinite(), (lses - whole).exp(), 0.0)
    got = (parts * weights.transpose(2, 3)[..., None]).sum(0)
    torch.testing.assert_close(got, o, rtol=1e-9, atol=1e-9)
