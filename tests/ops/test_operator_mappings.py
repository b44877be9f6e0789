"""Each operator against the recurrence of its paper (tests/recurrences.py), and its own options."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops
from slipstream.ops import gsa as gsa_module
from slipstream.ops import linear_attn as linear_attn_module
from tests.recurrences import (
    CHANNEL,
    HV,
    MAPPINGS,
    NAMED,
    SCALAR,
    B,
    H,
    K,
    M,
    T,
    V,
    beta,
    gated_delta_product,
    gla,
    grouped,
    gsa,
    householder,
    linear_attn,
    log_decay,
    qkv,
    randn,
    slots,
    trace,
    unit,
)


def both(name: str) -> list[Callable[..., Any]]:
    return [getattr(ops, f"chunk_{name}"), getattr(ops, f"fused_recurrent_{name}")]


def near(got: Tensor, want: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same(got: tuple[Tensor, Any], want: tuple[Tensor, Any], tolerance: float = 1e-12) -> None:
    for x, y in zip(flat(got), flat(want), strict=True):
        near(x, y, tolerance)


def flat(outputs: tuple[Tensor, Any]) -> list[Tensor]:
    o, state = outputs
    return [o, *(state if isinstance(state, tuple) else [state])]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", MAPPINGS)
def test_operator_is_its_recurrence(name: str, scale: float | None) -> None:
    make, recurrence, extra = MAPPINGS[name]
    args, S = make(), randn(B, HV, K, V)
    want, want_state = trace(recurrence(**args, S=S))
    options = {} if scale is None else {"scale": scale}
    default = 1.0 if name == "rwkv7" else K**-0.5
    for fn in both(name):
        if fn is ops.fused_recurrent_gla:
            args["gk"] = args.pop("g")
        for small in ({}, {"chunk_size": 16}) if "chunk" in fn.__name__ else ({},):
            further = {**extra, **options, **small, "output_final_state": True}
            o, state = fn(**args, **further, initial_state=S)
            near(o, (scale or default) * want)
            near(state, want_state)


@pytest.mark.parametrize("name", MAPPINGS)
def test_operator_state_v_first_and_default_state(name: str) -> None:
    make, recurrence, extra = MAPPINGS[name]
    args, S = make(), randn(B, HV, K, V)
    if "gv" in args:
        args.pop("gv")
        recurrence = lambda S, **x: gla(**x, gv=torch.zeros(B, T, HV, V).double(), S=S)  # noqa: E731
    _, want = trace(recurrence(**args, S=S))
    _, from_zero = trace(recurrence(**args, S=torch.zeros_like(S)))
    for fn in both(name):
        if fn is ops.fused_recurrent_gla:
            args["gk"] = args.pop("g")
        options = {**args, **extra, "output_final_state": True, "state_v_first": True}
        near(fn(**options, initial_state=S.mT)[1].mT, want)
        near(fn(**options)[1].mT, from_zero)
        assert fn(**{**options, "output_final_state": False})[1] is None


# linear_attn


def positive() -> dict[str, Tensor]:
    args = qkv()
    return {**args, "q": args["q"].exp(), "k": args["k"].exp()}


@pytest.mark.parametrize("fn", both("linear_attn"))
@pytest.mark.parametrize("v_first", [False, True])
def test_linear_attn_normalize_divides_by_the_sum_of_weights(fn: Callable, v_first: bool) -> None:
    args, kv, z = positive(), randn(B, HV, K, V), randn(B, 1, HV, K).exp()
    numerator, want_kv = trace(linear_attn(**args, S=kv))
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


def test_linear_attn_normalize_defaults_are_those_of_its_two_forms() -> None:
    args = positive()
    _, state = ops.chunk_linear_attn(**args, output_final_state=True)
    assert isinstance(state, tuple)
    _, state = ops.fused_recurrent_linear_attn(**args, output_final_state=True)
    assert isinstance(state, Tensor)


def test_linear_attn_normalize_weights_sum_to_one() -> None:
    args = positive()
    args["v"] = torch.ones_like(args["v"])
    near(ops.chunk_linear_attn(**args)[0], args["v"], 1e-9)


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
    """What GPUs do in bfloat16, in float64: the same result, states and gradients."""
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


# retention, lightning_attn, simple_gla, gla


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
def test_simple_gla_gamma_is_a_decay_for_all_tokens(fn: Callable) -> None:
    args = qkv()
    gamma = log_decay(HV).requires_grad_()
    wide = gamma.detach().expand(B, T, HV).clone().requires_grad_()
    got, want = fn(**args, g_gamma=gamma)[0], fn(**args, g=wide)[0]
    near(got, want)
    weights = randn(*got.shape)
    (dgamma,) = torch.autograd.grad((got * weights).sum(), gamma)
    (dwide,) = torch.autograd.grad((want * weights).sum(), wide)
    near(dgamma, dwide.sum((0, 1)))
    with pytest.raises(ValueError, match="g_gamma: want it in place of g"):
        fn(**args, g=wide, g_gamma=gamma)
    with pytest.raises(ValueError, match=r"g_gamma: want shape \(4,\)"):
        fn(**args, g_gamma=gamma[:1])


def test_simple_gla_without_gates_is_linear_attention() -> None:
    args = qkv()
    near(ops.chunk_simple_gla(**args)[0], ops.chunk_linear_attn(**args, normalize=False)[0])


def test_gla_gates_are_optional_token_by_token() -> None:
    args, gv = qkv(), log_decay(B, T, HV, V)
    want, _ = trace(gla(**args, g=torch.zeros(*CHANNEL).double(), gv=gv, S=torch.zeros(1).double()))
    near(ops.fused_recurrent_gla(**args, gv=gv)[0], K**-0.5 * want)


# gsa


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
    """What GPUs do in 16 bits: results, states and gradients up to 16-bit rounding."""
    args = {name: x.bfloat16().requires_grad_() for name, x in slots().items()}
    g, leaves, found = log_decay(B, T, H, M).float().requires_grad_(), list(args.values()), []
    states = randn(B, H, K, M).float(), randn(B, H, M, V).float()
    for narrow in (False, True):
        monkeypatch.setattr(gsa_module, "_stays_narrow", lambda *_, narrow=narrow: narrow)
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


def test_gsa_rejects_heads_and_states_that_do_not_fit() -> None:
    args, g = slots(), log_decay(B, T, H, M)
    with pytest.raises(ValueError, match="heads of q: want a multiple of heads of k = 2, got 3"):
        ops.chunk_gsa(**{**args, "q": randn(B, T, 3, K)}, g=g)
    with pytest.raises(TypeError, match="initial_state: want a tuple"):
        ops.chunk_gsa(**args, g=g, initial_state=randn(2, B, H, K, M))
    with pytest.raises(ValueError, match=r"initial_state\[1\]: want shape"):
        ops.chunk_gsa(**args, g=g, initial_state=(randn(B, H, K, M), randn(B, H, V, M)))


# the delta family


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "comba"])
def test_operator_l2_norm_in_kernel_is_the_norm_outside(name: str) -> None:
    make, _, extra = MAPPINGS[name]
    args = make()
    for key in ("q", "k", "p"):
        if key in args:
            args[key] = randn(*args[key].shape)
    outside = {**args}
    for key in ("q", "k", "p"):
        if key in args:
            x = args[key]
            outside[key] = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    for fn in both(name):
        near(fn(**args, use_qk_l2norm_in_kernel=True)[0], fn(**outside, **extra)[0])


def test_delta_rule_beta_is_optional_and_by_column_token_by_token() -> None:
    args = qkv(unit)
    one = ops.fused_recurrent_delta_rule(**args)[0]
    near(one, ops.chunk_delta_rule(**args, beta=torch.ones(*SCALAR).double())[0])
    columns = beta(B, T, HV, V)
    o, _ = ops.fused_recurrent_delta_rule(**args, beta=columns)
    for j in range(V):
        alone = {**args, "v": args["v"][..., j : j + 1]}
        near(o[..., j : j + 1], ops.chunk_delta_rule(**alone, beta=columns[..., j])[0])
    with pytest.raises(ValueError, match="beta: want 3 dimensions"):
        ops.chunk_delta_rule(**args, beta=columns)


@pytest.mark.parametrize("fn", both("kda"))
@pytest.mark.parametrize("flat_bias", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_kda_gate_in_kernel_is_the_gate_outside(
    fn: Callable, flat_bias: bool, bounded: bool
) -> None:
    args = {**qkv(unit), "beta": beta(*SCALAR)}
    raw, A_log, bias = randn(*CHANNEL), randn(HV), randn(HV, K)
    rate = A_log.exp()[:, None]
    g = -4 * (rate * (raw + bias)).sigmoid() if bounded else -rate * F.softplus(raw + bias)
    bound = {"lower_bound": -4.0} if bounded else {}
    got, _ = fn(
        **args,
        g=raw,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=bias.flatten() if flat_bias else bias,
        **bound,
    )
    near(got, fn(**args, g=g)[0])


def test_kda_gate_in_kernel_does_without_rate_or_bias() -> None:
    args, raw = {**qkv(unit), "beta": beta(*SCALAR)}, randn(*CHANNEL)
    got, _ = ops.chunk_kda(**args, g=raw, use_gate_in_kernel=True, lower_bound=-5.0)
    near(got, ops.chunk_kda(**args, g=-5 * raw.sigmoid())[0])
    A_log = randn(HV)
    got, _ = ops.chunk_kda(**args, g=raw, use_gate_in_kernel=True, A_log=A_log)
    near(got, ops.chunk_kda(**args, g=-A_log.exp()[:, None] * F.softplus(raw))[0])


def test_kda_safe_gate_is_a_promise_and_is_checked() -> None:
    args = {**qkv(unit), "beta": beta(*SCALAR), "g": log_decay(*CHANNEL)}
    plain, _ = ops.chunk_kda(**args)
    near(ops.chunk_kda(**args, safe_gate=True)[0], plain)
    near(ops.chunk_kda(**args, safe_gate=True, lower_bound=-5.0)[0], plain)
    gate = {"use_gate_in_kernel": True}
    with pytest.raises(ValueError, match=r"lower_bound: want a number in .* safe_gate"):
        ops.chunk_kda(**args, **gate, A_log=randn(HV), safe_gate=True)
    with pytest.raises(ValueError, match="A_log: want a tensor"):
        ops.chunk_kda(**args, **gate)
    for wrong in (0.0, -6.0):
        with pytest.raises(ValueError, match=r"lower_bound: want a number in \[-5, 0\)"):
            ops.chunk_kda(**args, **gate, lower_bound=wrong)


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
def test_operator_sigmoid_in_kernel_is_the_sigmoid_outside(name: str) -> None:
    args = MAPPINGS[name][0]()
    raw = randn(*SCALAR)
    for fn in both(name):
        flags = {"use_beta_sigmoid_in_kernel": True}
        got, _ = fn(**{**args, "beta": raw}, **flags)
        near(got, fn(**{**args, "beta": raw.sigmoid()})[0])
        got, _ = fn(**{**args, "beta": raw}, **flags, allow_neg_eigval=True)
        near(got, fn(**{**args, "beta": 2 * raw.sigmoid()})[0])
        with pytest.raises(ValueError, match=r"allow_neg_eigval: .* use_beta_sigmoid_in_kernel"):
            fn(**args, allow_neg_eigval=True)


@pytest.mark.parametrize("fns", list(zip(both("comba"), both("gated_delta_rule"))))
def test_comba_without_auxiliary_key_is_the_gated_delta_rule(fns: tuple) -> None:
    args = MAPPINGS["gated_delta_rule"][0]()
    near(fns[0](**args, p=None)[0], fns[1](**args)[0])
    ones = {**args, "beta": torch.ones_like(args["beta"])}
    args.pop("beta")
    near(fns[0](**args, p=args["k"])[0], fns[1](**ones)[0])


@pytest.mark.parametrize("name", ["dplr_delta_rule", "rwkv7"])
def test_operator_bounded_gate_is_a_promise_and_is_checked(name: str) -> None:
    args = MAPPINGS[name][0]()
    fn = both(name)[0]
    near(fn(**args, safe_gate=True, lower_bound=-9.0)[0], fn(**args)[0])
    with pytest.raises(ValueError, match="lower_bound: want a number below 0, got 0"):
        fn(**args, lower_bound=0.0)


def test_rwkv7_token_by_token_returns_the_state_unasked() -> None:
    args = MAPPINGS["rwkv7"][0]()
    assert ops.fused_recurrent_rwkv7(**args)[1] is not None
    assert ops.fused_recurrent_rwkv7(**args, output_final_state=False)[1] is None
    assert ops.chunk_rwkv7(**args)[1] is None


# gated_delta_product


@pytest.mark.parametrize("fn", both("gated_delta_product"))
def test_gated_delta_product_goes_without_decay(fn: Callable) -> None:
    args = householder(False)
    want, state = trace(gated_delta_product(**args, S=torch.zeros(B, HV, K, V).double()))
    same(fn(**args, num_householder=3, output_final_state=True), (K**-0.5 * want, state), 1e-11)


@pytest.mark.parametrize("fns", list(zip(both("gated_delta_product"), both("gated_delta_rule"))))
def test_gated_delta_product_of_one_is_the_gated_delta_rule(fns: tuple) -> None:
    args = MAPPINGS["gated_delta_rule"][0]()
    near(fns[0](**args, num_householder=1)[0], fns[1](**args)[0])


@pytest.mark.parametrize("fn", both("gated_delta_product"))
def test_gated_delta_product_reverse_keeps_the_order_within_a_token(fn: Callable) -> None:
    args = householder(True)

    def turn(x: Tensor, n: int) -> Tensor:
        return x.unflatten(1, (T, n)).flip(1).flatten(1, 2)

    turned = {name: turn(x, x.shape[1] // T) for name, x in args.items()}
    S = randn(B, HV, K, V)
    want, state = trace(gated_delta_product(**turned, S=S))
    got = fn(**args, num_householder=3, initial_state=S, output_final_state=True, reverse=True)
    same(got, (K**-0.5 * want.flip(1), state), 1e-11)


def test_gated_delta_product_takes_the_number_of_steps_in_place() -> None:
    args = householder(True)
    near(
        ops.chunk_gated_delta_product(*args.values(), 3)[0],
        ops.chunk_gated_delta_product(**args, num_householder=3)[0],
    )
    with pytest.raises(TypeError, match="num_householder"):
        ops.chunk_gated_delta_product(**args)
    for wrong in (0, 1.0):
        with pytest.raises(ValueError, match="num_householder: want an integer of at least 1"):
            ops.chunk_gated_delta_product(**args, num_householder=wrong)
    with pytest.raises(ValueError, match=r"k: want shape \(2, 74, 2, 5\), got \(2, 111, 2, 5\)"):
        ops.chunk_gated_delta_product(**args, num_householder=2)


# names and order


@pytest.mark.parametrize("name", NAMED)
def test_operator_with_many_tensors_wants_them_named(name: str) -> None:
    args = MAPPINGS[name][0]()
    for fn in both(name):
        with pytest.raises(TypeError, match="positional"):
            fn(*args.values())


@pytest.mark.parametrize("name", [n for n in MAPPINGS if n not in NAMED])
def test_operator_wants_options_named(name: str) -> None:
    make, _, extra = MAPPINGS[name]
    args = list(make().values())[: 3 if name == "gla" else None]
    for fn in both(name):
        with pytest.raises(TypeError, match="positional"):
            fn(*args, *extra.values(), *[None] * 3, 0.5)


def test_operator_errors_name_arguments_as_the_caller_does() -> None:
    args = MAPPINGS["rwkv6"][0]()
    with pytest.raises(ValueError, match=r"^w: want 4 dimensions \[B, T, HV, K\]"):
        ops.chunk_rwkv6(**{**args, "w": args["w"][..., 0]})
    with pytest.raises(ValueError, match=r"^r: want 4 dimensions"):
        ops.chunk_rwkv6(**{**args, "r": args["r"][0]})
    with pytest.raises(ValueError, match=r"^w: want shape"):
        ops.chunk_rwkv7(**{**MAPPINGS["rwkv7"][0](), "w": args["w"][:, 1:]})
    args = MAPPINGS["dplr_delta_rule"][0]()
    with pytest.raises(ValueError, match=r"^gk: want shape"):
        ops.chunk_dplr_delta_rule(**{**args, "gk": args["gk"][..., 1:]})
    args = slots()
    with pytest.raises(ValueError, match=r"^s: want shape"):
        ops.chunk_gsa(**{**args, "s": args["s"][:, 1:]}, g=log_decay(B, T, H, M))
