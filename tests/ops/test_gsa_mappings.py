"""gsa against its two recurrences, and its own options."""

from collections.abc import Callable

import pytest
import torch

from slipstream import ops
from slipstream.ops import gsa as gsa_module
from slipstream.runtime.dispatch import ValidationCache
from tests.support.mappings import both, near, same
from tests.support.recurrences import B, H, K, M, T, V, gsa, log_decay, randn, slots


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
