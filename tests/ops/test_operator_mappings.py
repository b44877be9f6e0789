"""Each operator against its recurrence (tests/support/recurrences.py), and its names."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear import dispatch
from slipstream.kernels.running_mean.op import running_max
from slipstream.ops import gsa as gsa_module
from slipstream.runtime.dispatch import ValidationCache
from slipstream.tools.catalog import Sample, family
from tests.support import recurrences
from tests.support.operators import LINEAR
from tests.support.recurrences import (
    HV,
    ROWS,
    SIZE,
    B,
    H,
    K,
    M,
    T,
    V,
    beta,
    both,
    gsa,
    log_decay,
    near,
    randn,
    same,
    slots,
    trace,
)

every_row = pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)


@every_row
@pytest.mark.parametrize("scale", [None, 0.3])
def test_operator_is_its_recurrence(op: Sample, scale: float | None) -> None:
    args = op.inputs(SIZE)
    S = args.pop("initial_state")
    want, want_state = trace(getattr(recurrences, family(op.op))(**args, S=S))
    options = {} if scale is None else {"scale": scale}
    default = 1.0 if family(op.op) == "rwkv7" else K**-0.5
    ways: list[dict] = [{}, {"impl": "reference"}]
    if op.op.startswith("chunk_"):
        ways.append({"chunk_size": 32 if "kda" in op.op else 16})
    for way in ways:
        o, state = op({**args, "initial_state": S}, **options, **way)
        near(o, (scale or default) * want)
        near(state, want_state)


@every_row
def test_operator_begins_with_a_state_of_zeros(op: Sample) -> None:
    args = op.inputs(SIZE)
    if op.variant == "values":
        args.pop("gv")
    S = torch.zeros_like(args.pop("initial_state"))
    _, from_zero = trace(getattr(recurrences, family(op.op))(**args, S=S))
    near(op(args, state_v_first=True)[1].mT, from_zero)
    assert op(args, state_v_first=True, output_final_state=False)[1] is None


# hgrn and rwkv4 have a scan of their own, which is the same for both
@pytest.mark.parametrize(
    "op", [x for x in LINEAR if family(x.op) not in ("hgrn", "rwkv4")], ids=lambda op: op.name
)
def test_operator_runs_by_chunks_or_tokens(op: Sample) -> None:
    """As it is called: the numbers are the same but for rounding."""
    seen: set[bool] = set()
    make_plan = dispatch.make_plan

    def make(terms: Any, names: Any, options: Any, recurrent: bool, asked: Any) -> Any:
        seen.add(recurrent)
        return make_plan(terms, names, options, recurrent, asked)

    with (
        mock.patch.object(ValidationCache, "get", lambda self, key, make, *_: make()),
        mock.patch.object(dispatch, "make_plan", make),
    ):
        op(op.inputs(SIZE))
    assert seen == {op.op.startswith("fused_recurrent_")}


@pytest.mark.parametrize("fn", both("gsa"))
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gsa_is_its_two_recurrences(fn: Callable, scale: float | None) -> None:
    args, g = slots(), log_decay(B, T, H, M)
    states = randn(B, H, K, M), randn(B, H, M, V)
    want = gsa(**args, g=g, Sk=states[0], Sv=states[1], scale=scale or K**-0.5)
    options = {"scale": scale, "output_final_state": True}
    if fn is ops.chunk_gsa:
        options["chunk_size"] = 16
    same(fn(**args, g=g, initial_state=states, **options), want, 1e-11)
    turned = tuple(x.mT for x in states)
    o, out = fn(**args, g=g, initial_state=turned, state_v_first=True, **options)
    same((o, tuple(x.mT for x in out)), want, 1e-11)


@pytest.mark.parametrize("fn", both("gsa"))
def test_gsa_with_scores_alone_in_float32(fn: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of GPUs in 16 bits: results, states and gradients up to 16-bit rounding."""
    args = {name: x.bfloat16().requires_grad_() for name, x in slots().items()}
    g, leaves, found = log_decay(B, T, H, M).float().requires_grad_(), list(args.values()), []
    states = randn(B, H, K, M).float(), randn(B, H, M, V).float()
    for narrow in (False, True):
        monkeypatch.setattr(gsa_module, "_stays_narrow", lambda *_, narrow=narrow: narrow)
        monkeypatch.setattr(gsa_module, "_PLANS", ValidationCache())
        o, ends = fn(**args, g=g, initial_state=states, output_final_state=True)
        assert o.dtype == torch.bfloat16
        loss = sum((x.float() ** 2).sum() for x in (o, *ends))
        found.append((o, *ends, *torch.autograd.grad(loss, [*leaves, g])))
    for wide, narrow in zip(*found, strict=True):
        error = (narrow.double() - wide.double()).norm() / wide.double().norm()
        assert error < 0.01


@pytest.mark.parametrize("fn", both("gsa"))
def test_gsa_groups_queries(fn: Callable) -> None:
    group, args, g = 3, slots(3 * H), log_decay(B, T, H, M)
    states = randn(B, H, K, M), randn(B, H, M, V)
    o, ends = fn(**args, g=g, initial_state=states, output_final_state=True)
    for i in range(group):
        alone = {**args, "q": args["q"][:, :, i::group]}
        want = fn(**alone, g=g, initial_state=states, output_final_state=True)
        same((o[:, :, i::group], ends), want)


@pytest.mark.parametrize("fn", both("gsa"))
@pytest.mark.parametrize("reverse", [False, True])
def test_gsa_without_gate_means_over_what_was_written(fn: Callable, reverse: bool) -> None:
    """ABC: slot m holds means of keys and values with weights exp(s)."""
    args = slots()
    turned = {n: x.flip(1) for n, x in args.items()} if reverse else args
    weights = turned["s"].exp()
    norm = weights.cumsum(1)[..., None]
    keys = torch.einsum("bthm,bthk->bthmk", weights, turned["k"]).cumsum(1) / norm
    values = torch.einsum("bthm,bthv->bthmv", weights, turned["v"]).cumsum(1) / norm
    p = (K**-0.5 * torch.einsum("bthk,bthmk->bthm", turned["q"], keys)).softmax(-1)
    want = torch.einsum("bthm,bthmv->bthv", p, values)
    near(fn(**args, reverse=reverse)[0], want.flip(1) if reverse else want)


def test_gsa_without_gate_refuses_what_it_cannot_continue() -> None:
    args = slots()
    with pytest.raises(NotImplementedError, match=r"initial_state: .* pass g"):
        ops.chunk_gsa(**args, initial_state=(randn(B, H, K, M), randn(B, H, M, V)))
    args = {name: x[:1] for name, x in args.items()}
    with pytest.raises(NotImplementedError, match=r"cu_seqlens: .* pass g"):
        ops.chunk_gsa(**args, cu_seqlens=torch.tensor([0, T]))


D = 5


def rwkv4_in_full(
    w: Tensor, u: Tensor, k: Tensor, v: Tensor, mean: Tensor, z: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The state before the first token is one more token, of weight exp(z) and value mean."""
    k, v = torch.cat([z[:, None], k], 1), torch.cat([mean[:, None], v], 1)
    outputs, n = [], k.shape[1]
    for t in range(1, n):
        past = k[:, :t] + torch.arange(t - 1, -1, -1, dtype=k.dtype)[:, None] * w
        weights = torch.cat([past, (u + k[:, t])[:, None]], 1).softmax(1)
        outputs.append((weights * v[:, : t + 1]).sum(1))
    weights = k + torch.arange(n - 1, -1, -1, dtype=k.dtype)[:, None] * w
    return torch.stack(outputs, 1), ((weights.softmax(1) * v).sum(1), weights.logsumexp(1))


def rwkv4_arguments() -> dict[str, Tensor]:
    return {"w": -randn(D).exp(), "u": randn(D), "k": randn(B, T, D), "v": randn(B, T, D)}


@pytest.mark.parametrize("fn", both("rwkv4"))
@pytest.mark.parametrize("impl", [None, "reference"])
def test_rwkv4_is_its_weighted_mean(fn: Any, impl: str | None) -> None:
    given, state = rwkv4_arguments(), (randn(B, D), randn(B, D))
    want = rwkv4_in_full(**given, mean=state[0], z=state[1])
    same(fn(**given, initial_state=state, output_final_state=True, impl=impl), want, 1e-10)
    nothing = (randn(B, D), torch.full((B, D), -torch.inf).double())
    o, _ = fn(**given, initial_state=nothing)
    torch.testing.assert_close(o, fn(**given)[0], rtol=0, atol=0)
    torch.testing.assert_close(o[:, 0], given["v"][:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rwkv4_of_weights_that_would_overflow(dtype: torch.dtype) -> None:
    given = rwkv4_arguments()
    given["k"] = 300 * given["k"]
    w = given["w"] = -torch.tensor([0.0, 1e-3, 1.0, 40.0, 1000.0]).double()
    given = {n: x.to(dtype) for n, x in given.items()}
    want, _ = rwkv4_in_full(
        **{n: x.double() for n, x in given.items()},
        mean=torch.zeros(B, D).double(),
        z=torch.full((B, D), -1e30).double(),
    )
    assert (w == given["w"].double()).sum() >= 3
    leaves = {n: x.requires_grad_() for n, x in given.items()}
    o, state = ops.chunk_rwkv4(**leaves, output_final_state=True)
    torch.testing.assert_close(o.double(), want, rtol=2e-2, atol=2e-3)
    grads = torch.autograd.grad(o.float().sum() + sum(x.sum() for x in state), [*leaves.values()])
    assert all(x.isfinite().all() for x in grads)


def test_rwkv4_rejects_what_does_not_fit() -> None:
    given = rwkv4_arguments()
    with pytest.raises(TypeError, match="initial_state: want a tuple"):
        ops.chunk_rwkv4(**given, initial_state=randn(B, D))
    with pytest.raises(ValueError, match=r"initial_state\[1\]: want"):
        ops.chunk_rwkv4(**given, initial_state=(randn(B, D), randn(1)))


@pytest.mark.parametrize("lengths", [None, (1, 0, 7, 4, 9)])
def test_running_max_is_that_of_a_loop(lengths: tuple[int, ...] | None) -> None:
    """Which sums are relative to: of the tokens so far, decayed, and of what was before."""
    rows = 2 if lengths is None else 1
    sequences = [(b, 0, 21) for b in range(rows)]
    cuts = None if lengths is None else torch.tensor([0, *accumulate(lengths)])
    if cuts is not None:
        sequences = [(0, int(x), int(y)) for x, y in pairwise(cuts)]
    k, start = torch.randn(rows, 21, D), torch.randn(len(sequences), D)
    w = -torch.rand(D)
    found = running_max(k, w, start, cuts)
    for n, (row, begin, end) in enumerate(sequences):
        m = start[n]
        for t in range(begin, end):
            m = torch.maximum(k[row, t], m + w)
            torch.testing.assert_close(found[row, t], m)


P = 2


def arguments(R: int, tokens: int = T) -> dict[str, Tensor]:
    return {
        "q": randn(B, tokens, HV, R, K),
        "k": randn(B, tokens, HV, R, K),
        "v": randn(B, tokens, HV, R, V),
        "g": log_decay(B, tokens, HV),
        "dt": beta(B, tokens, HV),
        "trap": beta(B, tokens, HV),
        "angles": randn(B, tokens, HV, P),
    }


def states(R: int) -> tuple[Tensor, ...]:
    return randn(B, HV, K, V), randn(B, HV, R, K), randn(B, HV, R, V), randn(B, HV, P)


def turned(x: Tensor, theta: Tensor) -> Tensor:
    """x [B, HV, R, K] as complex pairs, P of them by theta [B, HV, P]."""
    pairs = torch.view_as_complex(x[..., : 2 * P].unflatten(-1, (P, 2)).contiguous())
    pairs = pairs * torch.polar(torch.ones_like(theta), theta)[:, :, None]
    return torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., 2 * P :]], -1)


def recurrence(
    given: dict[str, Tensor], S: Tensor, key: Tensor, value: Tensor, theta: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    outputs = []
    for t in range(given["q"].shape[1]):
        q, k, v, g, dt, trap, angles = (x[:, t] for x in given.values())
        theta = theta + angles
        q, k = turned(q, theta), turned(k, theta)
        alpha, step = g.exp()[..., None, None], dt[..., None, None]
        share = trap[..., None, None]
        S = alpha * S + alpha * step * (1 - share) * (key.mT @ value)
        S = S + step * share * (k.mT @ v)
        outputs.append(q @ S)
        key, value = k, v
    return torch.stack(outputs, 1), (S, key, value, theta)


@pytest.mark.parametrize("fn", both("mamba3"))
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_mamba3_is_its_recurrence(fn: Any, R: int, scale: float | None) -> None:
    given, start = arguments(R), states(R)
    want, ends = recurrence(given, *start)
    for impl in (None, "reference"):
        options = {"scale": scale, "impl": impl, "output_final_state": True}
        o, after = fn(**given, initial_state=start, **options)
        near(o, (scale or 1.0) * want)
        for x, y in zip(after, ends, strict=True):
            near(x, y)


@pytest.mark.parametrize("fn", both("mamba3"))
def test_mamba3_starts_from_nothing_and_goes_on(fn: Any) -> None:
    given = arguments(2)
    zeros = tuple(0 * x for x in states(2))
    o, end = fn(**given, output_final_state=True)
    near(o, recurrence(given, *zeros)[0])
    parts = [{n: x[:, a:b] for n, x in given.items()} for a, b in ((0, 9), (9, T))]
    first, state = fn(**parts[0], output_final_state=True)
    second, state = fn(**parts[1], initial_state=state, output_final_state=True)
    near(torch.cat([first, second], 1), o)
    for x, y in zip(state, end, strict=True):
        near(x, y)


@pytest.mark.parametrize("fn", both("mamba3"))
def test_mamba3_without_angles_is_that_of_zeros(fn: Any) -> None:
    """Keys of one column have no pair that an angle could turn."""
    given, (S, key, value, theta) = arguments(1), states(1)
    given["angles"].zero_()
    for name in "qk":
        given[name][..., 1:] = 0
    start = S, torch.cat([key[..., :1], 0 * key[..., 1:]], -1), value, 0 * theta
    S[:, :, 1:] = 0
    want, ends = fn(**given, initial_state=start, scale=1.0, output_final_state=True)
    for columns in (K, 1):
        given |= {n: given[n][..., :columns] for n in "qk"} | {"angles": randn(B, T, HV, 0)}
        narrow = S[:, :, :columns], start[1][..., :columns], value, theta[..., :0]
        o, after = fn(**given, initial_state=narrow, scale=1.0, output_final_state=True)
        near(o, want)
        near(after[0], ends[0][:, :, :columns])
        assert after[3].shape == (B, HV, 0)
