"""linear_attn, retention, lightning_attn, simple_gla, gla: their own options."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.ops import linear_attn as linear_attn_module
from tests.support import recurrences
from tests.support.recurrences import (
    HV,
    B,
    K,
    T,
    V,
    both,
    grouped,
    linear_attn,
    log_decay,
    near,
    qkv,
    randn,
)


def positive() -> dict[str, Tensor]:
    args = qkv()
    return {**args, "q": args["q"].exp(), "k": args["k"].exp()}


@pytest.mark.parametrize("fn", both("linear_attn"))
@pytest.mark.parametrize("v_first", [False, True])
def test_linear_attn_normalize_divides_by_sum(fn: Callable, v_first: bool) -> None:
    args, kv, z = positive(), randn(B, HV, K, V), randn(B, 1, HV, K).exp()
    numerator, want_kv = recurrences.trace(linear_attn(**args, S=kv))
    q, k = grouped(args["q"], args["k"])
    sums = z + k.cumsum(1)
    scale = K**-0.5
    want = scale * numerator / ((scale * q * sums).sum(-1, keepdim=True) + 1e-10)
    o, (got_kv, got_z) = fn(
        **args,
        initial_state=(kv.mT if v_first else kv, z),
        output_final_state=True,
        normalize=True,
        state_v_first=v_first,
    )
    near(o, want)
    near(got_kv.mT if v_first else got_kv, want_kv)
    near(got_z, sums[:, -1:])


def test_linear_attn_normalize_defaults() -> None:
    args = positive()
    _, state = ops.chunk_linear_attn(**args, output_final_state=True)
    assert isinstance(state, tuple)
    _, state = ops.fused_recurrent_linear_attn(**args, output_final_state=True)
    assert isinstance(state, Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_attn_normalize_rounds_16_bit_once(dtype: torch.dtype) -> None:
    """A long sum in 16 bits would stop growing: 300 keys of 1 are 256 in bfloat16."""
    q = k = torch.ones(1, 300, 1, 4, dtype=dtype)
    v = torch.randn(1, 300, 1, 8, dtype=dtype)
    want = v.double().cumsum(1) / torch.arange(1, 301)[:, None, None]
    o, _ = ops.chunk_linear_attn(q, k, v)
    assert o.dtype == dtype
    torch.testing.assert_close(o, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_linear_attn_normalize_in_two_runs(
    v_first: bool, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of GPUs in bfloat16, in float64: the same result, states and gradients."""
    args, cu_seqlens = positive(), torch.tensor([0, 3, T])
    args = {name: x[:1].requires_grad_() for name, x in args.items()}
    kv = randn(2, HV, *((V, K) if v_first else (K, V))).requires_grad_()
    z = randn(2, 1, HV, K).exp().requires_grad_()
    leaves, found = (*args.values(), kv, z), []
    for two in (False, True):
        monkeypatch.setattr(linear_attn_module, "_two_are_faster", lambda q, two=two: two)
        o, state = ops.chunk_linear_attn(
            **args,
            initial_state=(kv, z),
            output_final_state=True,
            state_v_first=v_first,
            reverse=reverse,
            cu_seqlens=cu_seqlens,
        )
        results = (o, *state)
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in results)
        found.append((*results, *torch.autograd.grad(loss, leaves)))
    for one, two in zip(*found, strict=True):
        near(two, one)


def test_linear_attn_rejects_the_other_form_of_state() -> None:
    args, kv, z = positive(), randn(B, HV, K, V), randn(B, 1, HV, K)
    with pytest.raises(TypeError, match=r"initial_state: want a tuple .* normalize, got Tensor"):
        ops.chunk_linear_attn(**args, initial_state=kv)
    with pytest.raises(TypeError, match="initial_state: want a tensor"):
        ops.chunk_linear_attn(**args, initial_state=(kv, z), normalize=False)
    with pytest.raises(ValueError, match=r"initial_state\[1\]: want shape"):
        ops.chunk_linear_attn(**args, initial_state=(kv, z[:, 0]))


def test_retention_decays_in_float32_at_every_head() -> None:
    """1 - 2^(-5-h) itself is 1 in float32 from head 20 on, and head 20 would never forget."""
    heads, tokens = 22, 4096
    k, S = torch.zeros(1, tokens, heads, 1), torch.ones(1, heads, 1, 1)
    _, state = ops.chunk_retention(k, k, k, initial_state=S, output_final_state=True)
    want = torch.tensor([tokens * math.log1p(-(2.0 ** (-5 - h))) for h in range(heads)]).exp()
    torch.testing.assert_close(state.flatten(), want, rtol=1e-5, atol=1e-30)
    assert state[0, 20] < 0.9999


@pytest.mark.parametrize(("layer_idx", "num_layers"), [(-1, 4), (5, 4), (0, 0)])
def test_lightning_attn_rejects_layers_out_of_range(layer_idx: int, num_layers: int) -> None:
    with pytest.raises(ValueError, match=r"layer_idx|num_layers"):
        ops.chunk_lightning_attn(**qkv(), layer_idx=layer_idx, num_layers=num_layers)


@pytest.mark.parametrize("fn", both("simple_gla"))
def test_simple_gla_gamma_is_constant_decay(fn: Callable) -> None:
    args = qkv()
    gamma = log_decay(HV).requires_grad_()
    wide = gamma.detach().expand(B, T, HV).clone().requires_grad_()
    got, want = fn(**args, g_gamma=gamma)[0], fn(**args, g=wide)[0]
    near(got, want)
    weights = randn(*got.shape)
    (dgamma,) = torch.autograd.grad((got * weights).sum(), gamma)
    (dwide,) = torch.autograd.grad((want * weights).sum(), wide)
    near(dgamma, dwide.sum((0, 1)))
    near(fn(**args, g=wide, g_gamma=gamma)[0], fn(**args, g=2 * wide)[0])
    with pytest.raises(ValueError, match=r"g_gamma: want shape \(4,\)"):
        fn(**args, g_gamma=gamma[:1])
