"""The delta rule's walks in Gluon on sm_90: the oracle's numbers, twice the same bits.

bench/delta_hopper.py --check has more cases, each in a child that may hang or die.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.linear.hopper import plan
from slipstream.kernels.linear.reference import linear_reference
from slipstream.kernels.linear.terms import Terms

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_hopper, reason="needs sm_90")]

SIZES = {  # B, T, H, HV, K, V, lengths of packed sequences
    "whole": (1, 128, 1, 2, 128, 128, None),
    "odd": (2, 70, 1, 3, 128, 64, None),
    "packed": (1, 270, 2, 4, 64, 128, (5, 0, 200, 1, 64)),
}
LIMIT = 0.006


def inputs(size: tuple, gated: bool) -> Terms:
    B, T, H, HV, K, V, lengths = size
    N = B if lengths is None else len(lengths)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.rand(B, T, HV, device="cuda")
    cu = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    return Terms(
        torch.randn(B, T, H, K, **make),
        F.normalize(torch.randn(B, T, H, K, **make), dim=-1),
        torch.randn(B, T, HV, V, **make),
        g=torch.where(x < 0.1, -torch.inf, -x) if gated else None,
        beta=2 * torch.rand(B, T, HV, device="cuda"),
        initial_state=torch.randn(N, HV, K, V, device="cuda"),
        cu_seqlens=cu,
    )


def run(terms: Terms, do: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
    from slipstream.kernels.linear.hopper import delta_launch
    from slipstream.kernels.linear.triton import delta_launch as portable

    solved = portable._solve(terms)
    o, dv = torch.empty_like(do), torch.empty_like(do)
    final, dinitial = torch.empty_like(dfinal), torch.empty_like(dfinal)
    (HV, V), K = do.shape[2:], terms.q.shape[-1]
    dstates = do.new_empty(do.shape[0] * do.shape[1] // plan.CHUNK + 8, HV, V, K)
    delta_launch.walk(terms, *solved[:2], 0.1, o, s_in=terms.initial_state, s_out=final)
    delta_launch.walk_back(terms, do, *solved[:2], 0.1, dv, dstates, s_in=dfinal, s_out=dinitial)
    made = {"o": o, "final": final, "dv": dv, "dinitial": dinitial}
    if V % (2 * plan.TILE_V) == 0:
        made |= {"wide o": torch.empty_like(o), "wide final": torch.empty_like(final)}
        ends = {"s_in": terms.initial_state, "s_out": made["wide final"]}
        delta_launch.walk_wide(terms, *solved[:2], 0.1, made["wide o"], **ends)
    return made


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_delta_walks_match_reference(size: tuple, gated: bool) -> None:
    torch.manual_seed(0)
    terms = inputs(size, gated)
    assert plan.refuses(terms) is None
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
    got, again = (run(terms, do, dfinal) for _ in range(2))
    wide = {
        name: x.cpu() if name == "cu_seqlens" else x.cpu().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None
    }
    o, final = linear_reference(Terms(**wide), 0.1)
    loss = (o * do.cpu()).sum() + (final * dfinal.cpu()).sum()
    dv, dinitial = torch.autograd.grad(loss, [wide["v"], wide["initial_state"]])
    want = {"o": o, "final": final, "dv": dv, "dinitial": dinitial}
    for name, x in got.items():
        assert torch.equal(x, again[name]), name
        expected = want[name.removeprefix("wide ")]
        error = (x.cpu() - expected).norm() / expected.norm()
        assert error <= LIMIT, (name, error)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_delta_rule_of_more_programs_than_multiprocessors(gated: bool) -> None:
    """The walk of two tiles of V a program: every head as it is alone, the same bits twice."""
    from slipstream.kernels.linear.hopper import launch

    torch.manual_seed(0)
    terms = inputs((2, 200, 40, 40, 128, 128, None), gated)
    assert launch._takes_two(terms)
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")

    def both(given: Terms, heads: slice) -> dict[str, Tensor]:
        o, final, solved = launch.forward_kept(given, 0.1)
        dout, dend = do[:, :, heads].contiguous(), dfinal[:, heads].contiguous()
        return {
            "o": o, "final": final, **launch.backward(given, dout, dend, 0.1, kept=solved)
        }  # fmt: skip

    got, again = both(terms, slice(None)), both(terms, slice(None))
    few = slice(7, 9)
    alone = terms._replace(
        initial_state=terms.initial_state[:, few].contiguous(),
        **{
            name: x[:, :, few].contiguous()
            for name in ("q", "k", "v", "g", "beta")
            if (x := getattr(terms, name)) is not None
        },
    )
    assert not launch._takes_two(alone)
    for name, want in both(alone, few).items():
        assert torch.equal(got[name], again[name]), name
        heads = got[name][:, few] if want.shape[1] == 2 else got[name][:, :, few]
        error = (heads.double() - want.double()).norm() / want.double().norm()
        assert error <= 2 * LIMIT, (name, error)


SPLITS = {  # how strong gates are, and what cuts T
    "faint": (0.001, None),
    "weak": (0.1, None),
    "strong": (2.0, None),
    "packed": (0.05, (5, 475)),
}


@pytest.mark.parametrize("kept", [False, True], ids=["anew", "kept"])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_delta_segments_match_reference(
    split: tuple, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.linear.hopper import launch

    monkeypatch.setattr(launch, "LEAST", 1)
    monkeypatch.setattr(launch, "WORTH", 1)
    torch.manual_seed(0)
    strength, lengths = split
    terms = inputs((1, 480, 1, 2, 128, 128, lengths), False)
    g = -strength * torch.rand(1, 480, 2, device="cuda")
    terms = terms._replace(g=g)
    assert launch._split(terms) is not None
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")

    def both() -> dict[str, Tensor]:
        o, final, solved = launch.forward_kept(terms, 0.1)
        given = solved if kept else ()
        return {"o": o, "final": final, **launch.backward(terms, do, dfinal, 0.1, kept=given)}

    got, again = both(), both()
    wide = {
        name: x.cpu() if name == "cu_seqlens" else x.cpu().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None
    }
    o, final = linear_reference(Terms(**wide), 0.1)
    loss = (o * do.cpu()).sum() + (final * dfinal.cpu()).sum()
    names = [name for name in got if name not in ("o", "final")]
    grads = torch.autograd.grad(loss, [wide[name] for name in names])
    want = {"o": o, "final": final, **dict(zip(names, grads, strict=True))}
    for name, x in got.items():
        assert torch.equal(x, again[name]), name
        error = (x.cpu() - want[name]).norm() / want[name].norm()
        assert error <= 2 * LIMIT, (name, error)


BARS = {"o": 5e-3, "final": 5e-3, "g": 2e-2, "beta": 2e-2}  # of the others 8e-3


def channels(
    kind: str, gates: str, dtype: torch.dtype, lengths: tuple | None, size: tuple = (2, 150, 2, 2)
) -> Terms:
    """A gate a channel, and free a and b for dplr; strong gates are in chunks of their own ways."""
    B, T, H, HV, K = (1, 270, 1, 2, 128) if lengths else (*size, 128)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    k, a = (F.normalize(torch.randn(B, T, H, K, **make), dim=-1) for _ in range(2))
    g = -0.3 * torch.rand(B, T, HV, K, device="cuda")
    if gates == "strong":
        g = torch.where(torch.rand_like(g) < 0.1, 100 * g, g)
        g[:, 70] = -torch.inf
    cu = None if lengths is None else torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    b = -(a.float() * torch.rand(B, T, H, 1, device="cuda")).bfloat16()
    return Terms(
        torch.randn(B, T, H, K, **make),
        k,
        torch.randn(B, T, HV, 128, **make),
        g=g.to(dtype),
        beta=2 * torch.rand(B, T, HV, device="cuda") if kind == "kda" else None,
        a=None if kind == "kda" else a,
        b=None if kind == "kda" else b,
        initial_state=torch.randn(B if cu is None else len(cu) - 1, HV, K, 128, device="cuda"),
        cu_seqlens=cu,
    )


@pytest.mark.parametrize("lengths", [None, (5, 0, 200, 1, 64)], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("gates", ["weak", "strong"])
@pytest.mark.parametrize("kind", ["kda", "dplr"])
def test_gates_a_channel_match_reference(
    kind: str, gates: str, dtype: torch.dtype, lengths: tuple | None
) -> None:
    from slipstream.kernels.linear.hopper import dplr_launch, launch

    torch.manual_seed(0)
    terms = channels(kind, gates, dtype, lengths)
    do, dfinal = torch.randn_like(terms.v), torch.randn(terms.state_shape, device="cuda")
    assert plan.refuses(terms) is None
    assert dplr_launch.takes_grads(terms, do)

    def both() -> dict[str, Tensor]:
        o, final = launch.forward(terms, 0.1)
        return {"o": o, "final": final, **launch.backward(terms, do, dfinal, 0.1)}

    got, again = both(), both()
    wide = {
        name: x.cpu() if name == "cu_seqlens" else x.cpu().double().requires_grad_()
        for name, x in terms._asdict().items()
        if x is not None
    }
    o, final = linear_reference(Terms(**wide), 0.1)
    loss = (o * do.cpu()).sum() + (final * dfinal.cpu()).sum()
    names = [name for name in got if name not in ("o", "final")]
    grads = torch.autograd.grad(loss, [wide[name] for name in names])
    want = {"o": o, "final": final, **dict(zip(names, grads, strict=True))}
    assert got["g"].dtype == dtype
    for name, x in got.items():
        assert torch.equal(x, again[name]), name
        error = (x.cpu() - want[name]).norm() / want[name].norm()
        assert error <= BARS.get(name, 8e-3), (name, error)
