"""The fused backward's sums, masks, rings and turns, held against the oracle by numpy."""

from typing import Any

import pytest
import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.elementwise.rotary import rotary_reference
from tests.gluon_emulator.threads import Descriptor, launch_together
from tests.support.attention_calls import Call, check, incoming, want
from tests.support.sm90_attention import CALLS, at, desc, factors, flags, found, offsets, ptr, sizes

_LN2 = 0.6931471805599453
TAKEN = [
    *CALLS,
    Call("keys of nobody", T=70, S=700, q_lengths=(0, 70), k_lengths=(300, 400), right=0),
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
