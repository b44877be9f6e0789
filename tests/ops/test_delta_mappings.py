"""The delta family's own options, against what they stand for."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import ops
from tests.support import recurrences
from tests.support.recurrences import (
    CHANNEL,
    HV,
    SCALAR,
    K,
    V,
    arguments,
    beta,
    both,
    near,
    qkv,
    randn,
    same,
    unit,
)


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda", "comba"])
def test_operator_l2_norm_in_kernel(name: str) -> None:
    args = arguments(name)
    for key in ("q", "k", "p"):
        if key in args:
            args[key] = randn(*args[key].shape)
    outside = {**args}
    for key in ("q", "k", "p"):
        if key in args:
            x = args[key]
            outside[key] = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    for fn in both(name):
        near(fn(**args, use_qk_l2norm_in_kernel=True)[0], fn(**outside)[0])


def test_fused_recurrent_delta_rule_beta_shapes() -> None:
    args = qkv(unit)
    one = ops.fused_recurrent_delta_rule(**args)[0]
    near(one, ops.chunk_delta_rule(**args, beta=torch.ones(*SCALAR).double())[0])
    columns = beta(recurrences.B, recurrences.T, HV, V)
    o, _ = ops.fused_recurrent_delta_rule(**args, beta=columns)
    for j in range(V):
        alone = {**args, "v": args["v"][..., j : j + 1]}
        near(o[..., j : j + 1], ops.chunk_delta_rule(**alone, beta=columns[..., j])[0])
    with pytest.raises(ValueError, match="beta: want 3 dimensions"):
        ops.chunk_delta_rule(**args, beta=columns)


@pytest.mark.parametrize("fn", both("kda"))
@pytest.mark.parametrize("flat_bias", [False, True])
@pytest.mark.parametrize("least", [None, -4.0, -8.0])
def test_kda_gate_in_kernel_is_the_gate_outside(
    fn: Callable, flat_bias: bool, least: float | None
) -> None:
    args = {**qkv(unit), "beta": beta(*SCALAR)}
    raw, A_log, bias = randn(*CHANNEL), randn(HV), randn(HV, K)
    rate = A_log.exp()[:, None]
    g = -rate * F.softplus(raw + bias)
    if least is not None:
        g = least * (rate * (raw + bias)).sigmoid()
    got, _ = fn(
        **args,
        g=raw,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=bias.flatten() if flat_bias else bias,
        lower_bound=least,
    )
    near(got, fn(**args, g=g)[0])


def test_kda_gate_in_kernel_without_rate_or_bias() -> None:
    args, raw = {**qkv(unit), "beta": beta(*SCALAR)}, randn(*CHANNEL)
    got, _ = ops.chunk_kda(**args, g=raw, use_gate_in_kernel=True, lower_bound=-5.0)
    near(got, ops.chunk_kda(**args, g=-5 * raw.sigmoid())[0])
    A_log = randn(HV)
    got, _ = ops.chunk_kda(**args, g=raw, use_gate_in_kernel=True, A_log=A_log)
    near(got, ops.chunk_kda(**args, g=-A_log.exp()[:, None] * F.softplus(raw))[0])


def test_kda_safe_gate_is_checked() -> None:
    args = {**qkv(unit), "beta": beta(*SCALAR), "g": recurrences.log_decay(*CHANNEL)}
    plain, _ = ops.chunk_kda(**args)
    near(ops.chunk_kda(**args, safe_gate=True)[0], plain)
    near(ops.chunk_kda(**args, safe_gate=True, lower_bound=-5.0)[0], plain)
    gate = {"use_gate_in_kernel": True}
    with pytest.raises(ValueError, match=r"lower_bound: want a number below 0 .* safe_gate"):
        ops.chunk_kda(**args, **gate, A_log=randn(HV), safe_gate=True)
    with pytest.raises(ValueError, match="A_log: want a tensor"):
        ops.chunk_kda(**args, **gate)
    for wrong in (0.0, float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="lower_bound: want a number below 0"):
            ops.chunk_kda(**args, **gate, lower_bound=wrong)


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
def test_operator_sigmoid_in_kernel_is_the_sigmoid_outside(name: str) -> None:
    args = arguments(name)
    raw = randn(*SCALAR)
    for fn in both(name):
        flags = {"use_beta_sigmoid_in_kernel": True}
        got, _ = fn(**{**args, "beta": raw}, **flags)
        near(got, fn(**{**args, "beta": raw.sigmoid()})[0])
        got, _ = fn(**{**args, "beta": raw}, **flags, allow_neg_eigval=True)
        near(got, fn(**{**args, "beta": 2 * raw.sigmoid()})[0])
        with pytest.raises(ValueError, match=r"allow_neg_eigval: .* use_beta_sigmoid_in_kernel"):
            fn(**args, allow_neg_eigval=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
def test_operator_sigmoid_in_kernel_bits(name: str, dtype: torch.dtype) -> None:
    args = {x: y.to(dtype) for x, y in arguments(name).items()}
    raw = (4 * randn(*SCALAR)).to(dtype)
    for fn in both(name):
        inputs = [args[x].requires_grad_() for x in "qkvg"]
        inside, _ = fn(**{**args, "beta": raw}, use_beta_sigmoid_in_kernel=True)
        outside, _ = fn(**{**args, "beta": raw.sigmoid()})
        assert torch.equal(inside, outside)
        weight = torch.randn_like(inside)
        found = torch.autograd.grad(inside, inputs, weight)
        torch.testing.assert_close(
            found, torch.autograd.grad(outside, inputs, weight), rtol=0, atol=0
        )


@pytest.mark.parametrize("fns", list(zip(both("comba"), both("gated_delta_rule"))))
def test_comba_without_auxiliary_key_erases_under_k(fns: tuple) -> None:
    args = arguments("gated_delta_rule")
    near(fns[0](**args, p=None)[0], fns[0](**args, p=args["k"])[0])
    none = {**args, "g": torch.zeros_like(args["g"])}
    near(fns[0](**none, p=None)[0], fns[1](**none)[0])
    ones = {**args, "beta": torch.ones_like(args["beta"])}
    args.pop("beta")
    near(fns[0](**args, p=None)[0], fns[0](**ones, p=None)[0])


@pytest.mark.parametrize("fn", both("comba"))
@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("low", [-1.0, -20.0, -1e4, -torch.inf])
def test_comba_erases_what_was_there_before_the_decay(fn: Callable, impl: str, low: float) -> None:
    """Also of a state that then decays to nothing, where dividing p by the decay has no answer."""
    args = arguments("comba")
    args["g"] = torch.where(torch.rand(SCALAR) < 0.3, low, args["g"])
    args["initial_state"] = randn(recurrences.B, HV, K, V)
    inputs = [x.requires_grad_() for x in args.values()]
    S, rest = args["initial_state"], {x: y for x, y in args.items() if x != "initial_state"}
    o, state = recurrences.trace(recurrences.comba(**rest, S=S))
    want = K**-0.5 * o, state
    found = fn(**args, output_final_state=True, impl=impl)
    same(found, want, 1e-10)
    weights = [randn(*x.shape) for x in want]
    for got, wanted in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(want, inputs, weights),
        strict=True,
    ):
        near(got, wanted, 1e-9)


@pytest.mark.parametrize("fn", both("gated_delta_product"))
def test_gated_delta_product_reverse_step_order(fn: Callable) -> None:
    args = recurrences.householder(True)

    def turn(x: Tensor, n: int) -> Tensor:
        return x.unflatten(1, (recurrences.T, n)).flip(1).flatten(1, 2)

    turned = {name: turn(x, x.shape[1] // recurrences.T) for name, x in args.items()}
    S = randn(recurrences.B, HV, K, V)
    want, state = recurrences.trace(recurrences.gated_delta_product(**turned, S=S))
    got = fn(**args, num_householder=3, initial_state=S, output_final_state=True, reverse=True)
    same(got, (K**-0.5 * want.flip(1), state), 1e-11)


def test_gated_delta_product_positional_steps() -> None:
    args = recurrences.householder(True)
    near(
        ops.chunk_gated_delta_product(*args.values(), 3)[0],
        ops.chunk_gated_delta_product(**args, num_householder=3)[0],
    )
    with pytest.raises(TypeError, match="num_householder"):
        ops.chunk_gated_delta_product(**args)
    for wrong in (0, 1.0, 3.0, [3]):  # 3 itself has passed before
        with pytest.raises((ValueError, TypeError), match="num_householder: want an integer"):
            ops.chunk_gated_delta_product(**args, num_householder=wrong)
    with pytest.raises(ValueError, match=r"k: want shape \(2, 74, 2, 5\), got \(2, 111, 2, 5\)"):
        ops.chunk_gated_delta_product(**args, num_householder=2)
    with pytest.raises(TypeError, match="q: want a"):
        ops.chunk_gated_delta_product(**{**args, "q": None}, num_householder=3)  # pyright: ignore
