"""The fused backward's sums, masks, rings and turns, held against the oracle by numpy."""

from typing import Any

import pytest
import torch

from slipstream.kernels.softmax.terms import Options, Terms
from tests.kernels.softmax.calls import Call, check, incoming, want
from tests.kernels.softmax.gluon_by_threads import Descriptor, launch_together
from tests.kernels.softmax.test_hopper_by_threads import (
    CALLS,
    at,
    desc,
    factors,
    flags,
    found,
    ptr,
    sizes,
)

_LN2 = 0.6931471805599453
TAKEN = [
    *CALLS[:5],
    Call("ahead", T=200, S=300, H=2, HKV=1, right=70),
    Call("capped", T=260, S=260, right=0, softcap=4.0),
]


@pytest.mark.parametrize("D", [16, 64])
@pytest.mark.parametrize("call", TAKEN, ids=lambda call: call.name)
def test_fused_backward_matches_reference(call: Call, D: int) -> None:
    call = Call(**{**vars(call), "D": D, "DV": D})
    terms, options = call.terms(torch.float64), call.options
    do, dlse = incoming(terms)
    right = want(terms, options, do, dlse)
    units = sizes(terms, options, True)[8]
    for programs in (min(3, units), units):
        grads = fused(terms, options, right, do, dlse, programs)
        check(grads, {name: right[name] for name in grads}, 1e-9, call.name)


def fused(
    terms: Terms, options: Options, right: dict, do: Any, dlse: Any, programs: int
) -> dict[str, Any]:
    q, k, v = terms[:3]
    B, T, H, D = q.shape
    o, lse = right["o"], right["lse"]
    base, delta = torch.full((2, B, H, -(-T // 4) * 4), torch.nan, dtype=torch.float64)
    base[..., :T] = torch.where(lse == -torch.inf, torch.inf, lse / _LN2)
    delta[..., :T] = (o * do).sum(-1).transpose(1, 2) - dlse
    dk, dv = (torch.full_like(x, torch.nan) for x in (k, v))
    room = -(-T // 64) * 64
    sums = torch.full((B, H, room, D), 0.0 if k.shape[1] < T else torch.nan).double()
    turns = torch.zeros(B, H, room // 64, dtype=torch.int32)
    rows = [Descriptor(x.numpy().reshape(-1), (64,)) for x in (base, delta)]
    dq = Descriptor(sums.numpy().reshape(-1, D), (64, D // 2))
    launch_together(
        found("backward_fused:softmax_bwd_sm90_kernel"), programs,
        (desc(q, 64), desc(k, 128), desc(v, 128), desc(do, 64), *rows, dq, ptr(turns), ptr(dk),
         ptr(dv), *factors(options), options.scale, *sizes(terms, options, True), *at(q), *at(k),
         *at(v), *at(do)),
        BM=64, D=D, ST=2, **flags(terms, options),
    )  # fmt: skip
    return {"q": options.scale * sums[:, :, :T].transpose(1, 2), "k": dk, "v": dv}
