"""RWKV-7's decoding step on a pool, its mixes and low-rank products, against float64, and the layer
by them beside its own parts."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.time_mix import rwkv7_step as low_rank
from slipstream.kernels.time_mix import rwkv7_step as op
from slipstream.kernels.time_mix.rwkv7_step import LowRankInputs
from slipstream.layers import RWKV7
from slipstream.layers import rwkv7 as layers
from slipstream.nn import projections
from slipstream.ops import rwkv7_step, token_mix_step
from tests.support.interpreted import error

INDICES, SLOTS = (3, -1, 0), 5
TOKENS = ("r", "w", "k", "v", "a", "g", "v_gate", "first_value")
OF_VALUES = ("v_gate", "first_value", "v_bias")
EPS = 1e-3


@dataclass(frozen=True)
class Sizes:
    """first: of the first layer, which has no first_value."""

    H: int = 2
    K: int = 16
    N: int = 3
    first: bool = False
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32


def make(n: Sizes, strength: float = 1.0) -> dict[str, Any]:
    """Arguments of rwkv7_step; tokens are columns of wider tensors. strength: of w and a."""
    D = n.H * n.K
    args = {name: torch.randn(n.N, 2 * D).to(n.dtype)[:, :D] for name in TOKENS}
    names = ("w_bias", "a_bias", "v_bias", "k_k", "k_a", "norm_weight", "norm_bias")
    args |= {name: torch.randn(D) for name in names} | {"r_k": torch.randn(n.H, n.K)}
    args |= {name: strength * args[name] for name in ("w", "a")}
    args["state"] = torch.randn(SLOTS, n.H, n.K, n.K).to(n.pool_dtype)
    return {name: x for name, x in args.items() if not (n.first and name in OF_VALUES)}


def formula(args: dict[str, Tensor], indices: Any = None) -> tuple[Tensor, Tensor]:
    """y and the pool afterwards in float64, one head of one sequence at a time."""
    t = {name: x.double() for name, x in args.items()}
    H, K = args["r_k"].shape
    state, y = t.pop("state").clone(), torch.zeros(t["r"].shape, dtype=torch.float64)
    y = y.to(state.device)
    for n, slot in enumerate(range(y.shape[0]) if indices is None else indices):
        for h in range(H if slot >= 0 else 0):
            of = slice(h * K, (h + 1) * K)
            x = {
                m: z[h] if m == "r_k" else z[n, of] if m in TOKENS else z[of] for m, z in t.items()
            }
            decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(x["w"] + x.get("w_bias", 0)))
            a, v, S = torch.sigmoid(x["a"] + x.get("a_bias", 0)), x["v"], state[slot, h]
            if "v_gate" in x:
                v = v + (x["first_value"] - v) * torch.sigmoid(x["v_gate"] + x["v_bias"])
            kk = F.normalize(x["k"] * x["k_k"], dim=0)
            k = x["k"] * (1 + (a - 1) * x["k_a"])
            S = decay[:, None] * S - torch.outer(kk * a, kk @ S) + torch.outer(k, v)
            state[slot, h] = S
            o = F.layer_norm(x["r"] @ S, (K,), x["norm_weight"], x["norm_bias"], EPS)
            y[n, of] = (o + (x["r"] * k * x["r_k"]).sum() * v) * x["g"]
    return y, state


def limit_of(x: Tensor, narrow: float, impl: str | None) -> float:
    """Of x in float32, or one rounding to 16 bits; Triton's interpreter cuts off instead."""
    cuts = impl == "triton" and not x.is_cuda
    return narrow if x.dtype == torch.float32 else 1e-2 if cuts else 5e-3


def check(n: Sizes, impl: str | None, strength: float = 1.0) -> None:
    """By index into a pool whose slots and heads are apart, K-first and V-first, and without."""
    args = make(n, strength)
    limit, of_pool = (limit_of(args[name], 2e-5, impl) for name in ("r", "state"))
    at = torch.tensor(INDICES)
    y, pool = formula(args, INDICES)
    for v_first in (False, True):
        state = args["state"].mT if v_first else args["state"]
        wide = torch.full((SLOTS, n.H + 1, n.K + 3, n.K), 7.0, dtype=n.pool_dtype)
        view = wide[:, 1:, : n.K].copy_(state)
        out = torch.full((n.N, 2 * n.H * n.K), torch.nan, dtype=n.dtype)[:, ::2]
        options = {"norm_eps": EPS, "state_v_first": v_first, "impl": impl}
        given: dict[str, Any] = {**args, "state": view}
        got = rwkv7_step(**given, state_indices=at, out=out, **options)
        found = view.mT if v_first else view
        assert got is out and error(out, y) < limit, (n, impl, v_first, error(out, y))
        off = error(found, pool)
        assert off < of_pool, (n, impl, v_first, off)
        untouched = [i for i in range(SLOTS) if i not in INDICES]
        assert torch.equal(found[untouched], args["state"][untouched]), (n, impl, v_first)
        assert not out[1].any()
        assert bool((wide[:, 0] == 7).all()) and bool((wide[:, :, n.K :] == 7).all())
    few: dict[str, Any] = {**args, "state": args["state"][: n.N].clone()}
    y, pool = formula(few)
    out = rwkv7_step(**few, norm_eps=EPS, impl=impl)
    assert out.dtype == n.dtype and error(out, y) < limit
    assert error(few["state"], pool) < of_pool


def check_nobody_lives(impl: str | None) -> None:
    """No NaN of a row without a slot reaches anything."""
    args = {name: x.fill_(torch.nan) if name in TOKENS else x for name, x in make(Sizes()).items()}
    before = args["state"].clone()
    y = rwkv7_step(**args, state_indices=torch.tensor([-1, -2, -1]), impl=impl)
    assert not y.any() and torch.equal(args["state"], before)


def check_probe() -> None:
    """It allows for the rounding of states that are narrower than the tokens."""
    args = make(Sizes(pool_dtype=torch.bfloat16))
    state = args.pop("state")
    out, rest = torch.empty_like(args["r"]), (EPS, False, "triton")
    assert op._call._mismatch((out, state, None, *op.StepInputs(**args), *rest)) is None


def check_mixes(
    N: int, D: int, M: int, dtype: torch.dtype, pool_dtype: torch.dtype, impl: str | None
) -> None:
    x, mu = torch.randn(N, 2 * D).to(dtype)[:, :D], torch.randn(M, D)
    state = torch.randn(N + 2, D + 3).to(pool_dtype)[:, :D]
    before = state.clone()
    at = torch.arange(N, 0, -1, dtype=torch.int32)
    at[0] = -1
    y = token_mix_step(x, mu, state=state, state_indices=at, impl=impl)
    limit = limit_of(x, 1e-6, impl)
    wide, rows = x.double(), before.double()[at.clamp(min=0).long()]
    want = wide + (rows - wide) * mu.double()[:, None]
    want[:, 0] = 0
    assert y.dtype == dtype and error(y, want) < limit
    assert torch.equal(state[at[1:].long()], x[1:].to(pool_dtype))
    assert torch.equal(state[[0, N, N + 1]], before[[0, N, N + 1]])
    y = token_mix_step(x, mu, state=before[:N].clone(), impl=impl)
    want = wide + (before[:N].double() - wide) * mu.double()[:, None]
    assert error(y, want) < limit


def low_rank_inputs(N: int, D: int, ranks: tuple[int, ...], dtype: torch.dtype) -> LowRankInputs:
    given: list[Any] = [torch.randn(N, n).to(dtype) for n in ranks]
    ups: list[Any] = [(torch.randn(n, D) * n**-0.5).to(dtype) for n in ranks]
    missing = [None] * (4 - len(ranks))
    return LowRankInputs(*given, *missing, *ups, *missing)


def check_low_rank(
    N: int, D: int, ranks: tuple[int, ...], dtype: torch.dtype, impl: str | None
) -> None:
    t = low_rank_inputs(N, D, ranks, dtype)
    wide = LowRankInputs._make(x if x is None else x.double() for x in t)
    want, y = low_rank.plain_low_rank(wide), low_rank.low_rank(t, impl)
    limit = limit_of(t.w, 2e-6, impl)
    assert y.dtype == torch.float32 and error(y, want) < limit, (N, D, ranks, error(y, want))


def check_all(impl: str | None) -> None:
    half = torch.bfloat16
    check(Sizes(H=3, K=20), impl)
    check(Sizes(H=1, K=64, first=True, dtype=half, pool_dtype=half), impl)
    check(Sizes(H=2, K=8, pool_dtype=half), impl)
    for strength in (0.0, 20.0):
        check(Sizes(), impl, strength=strength)
    check_nobody_lives(impl)
    for dtype, pool in ((torch.float32, torch.float32), (half, half), (half, torch.float32)):
        check_mixes(3, 40, 6, dtype, pool, impl)
    check_mixes(2, 600, 1, torch.float32, torch.float32, impl)
    # the interpreter gets products of bfloat16 wrong
    for dtype in (torch.float32, torch.float16):
        check_low_rank(3, 40, (5, 64, 133, 32), dtype, impl)
        check_low_rank(17, 72, (32, 40, 96), dtype, impl)


@torch.no_grad()
def check_layer(impl: str | None) -> list[str]:
    """Two tokens of a first layer and of a later one, by these operators and by parts; the
    operators of the former."""
    calls: list[str] = []

    def recorded(name: str, fn: Any) -> Any:
        return lambda *args, **options: calls.append(name) or fn(*args, **options, impl=impl)

    names = ("token_mix_step", "low_rank", "rwkv7_step")
    before = {name: getattr(layers, name) for name in names} | {"": projections._on_device}
    for name in names:
        setattr(layers, name, recorded(name, before[name]))
    for layer_idx, first in ((0, None), (1, torch.randn(3, 1, 32))):
        layer = RWKV7(32, 2, layer_idx=layer_idx, num_layers=2).eval()
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        x, found = torch.randn(3, 7, 32), []
        for on_device in (False, True):
            projections._on_device = lambda x, on=on_device: on
            begun = None if first is None else first.expand(-1, 5, -1)
            _, state = layer(x[:, :5], use_cache=True, first_value=begun)
            options: dict[str, Any] = (
                {"output_value": True} if first is None else {"first_value": first}
            )
            outs = [layer.step(x[:, t : t + 1], state, **options) for t in (5, 6)]
            found.append([*(outs if first is not None else sum(outs, ())), *state.values()])
        for i, (got, want) in enumerate(zip(*found, strict=True)):
            assert got.shape == want.shape and error(got, want.double()) < 2e-5, (layer_idx, i)
    for name in names:
        setattr(layers, name, before[name])
    projections._on_device = before[""]
    return calls


def check_tiles_of_columns(impl: str | None) -> None:
    """As of heads of more channels than a program has registers for."""
    from slipstream.kernels.time_mix.triton import rwkv7_step as kernel

    most, kernel.ELEMENTS = kernel.ELEMENTS, 1024
    assert kernel.tile_of(40)[:2] == (64, 16)
    check(Sizes(H=1, K=40), impl)
    kernel.ELEMENTS = most
