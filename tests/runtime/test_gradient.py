"""Operators called without the autograd.Function around them, as graphs of torch.export do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import slipstream
from slipstream.kernels.attention import latent
from slipstream.kernels.attention import op as attention
from slipstream.kernels.conv import op as conv
from slipstream.kernels.elementwise import (
    decay_gate,
    embedding,
    erase,
    glu,
    log_probs,
    mamba_terms,
    rotary,
    rotation,
    token_shift,
)
from slipstream.kernels.gated_scan import op as scan
from slipstream.kernels.hyper_connection import op as hyper
from slipstream.kernels.indexer import loss as index_loss
from slipstream.kernels.linear import gated_delta_product, gsa
from slipstream.kernels.linear import op as linear
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.loss import distill, fused
from slipstream.kernels.loss import op as loss
from slipstream.kernels.matmul import op as matmul
from slipstream.kernels.norm import op as norm
from slipstream.kernels.primitives.norm_options import NormOptions
from slipstream.kernels.running_mean import op as running_mean
from slipstream.kernels.selected_attention import op as selected
from slipstream.kernels.selective_scan import op as selective_scan
from slipstream.kernels.time_mix import rwkv7, token_mix
from slipstream.runtime import autograd, backends

assert slipstream.ops  # every operator is defined by now
MHC = 1e-6, 1e-6, 3, 2.0, 0.0
IDS = torch.tensor([0, 2, 1, 4])
LOSS = (-100, 0.1, 0.0, 0.0, 1.0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _linear() -> tuple:
    terms = LinearInputs(
        rand(1, 5, 1, 2),
        rand(1, 5, 1, 2),
        rand(1, 5, 2, 3),
        g=-rand(1, 5, 2).abs(),
        beta=rand(1, 5, 2).sigmoid(),
        initial_state=rand(1, 2, 2, 3),
    )
    return (*terms, 0.5, 4, "eager", False)


def _softmax() -> tuple:
    q, k, v = rand(1, 3, 2, 4), rand(1, 3, 1, 4), rand(1, 3, 1, 2)
    return (q, k, v, None, rand(2), *[None] * 5, 0.5, -1, 0, 0.0, 0.0, "eager")


def _selected() -> tuple:
    lists = torch.tensor([0, 1]).int().expand(1, 3, 1, 2)
    tensors = *_softmax()[:3], lists, rand(2), None, None, None
    return (*tensors, 0.5, -1, 0, True, 1, False, "eager")


def _conv() -> tuple:
    tensors = rand(1, 5, 3), rand(3, 2), rand(3), rand(1, 5, 3), rand(1, 3, 2)
    return (*tensors, None, None, 0, True, "eager")


def _norm() -> tuple:
    rows = rand(3, 4), rand(4), None, rand(3, 4), rand(3, 4)
    return (*rows, *NormOptions(1e-5), True, "eager")


def _matmul() -> tuple:
    given = rand(3, 4), rand(4, 2), rand(2), rand(3, 2), None, None
    return (*given, "silu", "", torch.float64, (), "eager")


def _rotary(back: bool) -> tuple:
    return (rand(1, 3, 2, 4), rand(3, 2), rand(3, 2), None, False, back, "eager")


def _shift(back: bool) -> tuple:
    return (rand(1, 4, 3), rand(1, 3), None, back, "eager")


def _linear_loss() -> tuple:
    return (rand(4, 3), rand(5, 3), rand(5), IDS, None, *LOSS, True, "eager")


def _distill() -> tuple:
    student, teacher = (rand(4, 3), rand(5, 3), rand(5)), (rand(4, 2), rand(5, 2), None)
    return (*student, *teacher, None, None, 1.5, True, "eager")


def _slots() -> tuple:
    wide = [torch.randn(1, 5, 1, 3) for _ in range(4)]
    return (*wide, -torch.rand(1, 5, 1, 3), None, None, None, 0.5, 4, "eager", "eager", True)


def _steps() -> tuple:
    terms = torch.randn(1, 4, 1, 3), torch.randn(1, 8, 1, 3), torch.randn(1, 8, 1, 2)
    return (*terms, torch.rand(1, 8, 1), None, None, 0.5, 4, "eager")


def _index_loss() -> tuple:
    indexer, attention = (rand(1, 5, 2, 4), rand(1, 5, 4), rand(1, 5, 2)), (
        rand(1, 5, 2, 3), rand(1, 5, 1, 3)
    )  # fmt: skip
    options = None, None, 1, 1, True, False, True
    return (*indexer, *options, *attention, None, 0.5, 0.6, True)


def _heads(count: int) -> list[Tensor]:
    return [rand(1, 4, 2, 3) for _ in range(count)]


def _selective() -> tuple:
    u, delta, z = (rand(1, 4, 3) for _ in "udz")
    A, B, C = -rand(3, 2).abs(), rand(1, 4, 1, 2), rand(1, 4, 1, 2)
    return (u, delta, A, B, C, rand(3), z, rand(3), rand(1, 3, 2), None, True, True, "eager")


# operator, its arguments, how many results have a gradient, and where not all of the floating
# arguments have one, how many of them, from the first one on
ROWS: dict[str, tuple] = {
    "linear": (linear.call_forward, _linear, 2),
    "scan": (
        scan._call_forward,
        lambda: (rand(1, 4, 3), -rand(1, 4, 3).abs(), rand(1, 3), None, "eager"),
        2,
    ),
    "selective_scan": (selective_scan._call_forward, _selective, 2),
    "softmax": (attention.call_forward, _softmax, 2),
    "selected": (selected._forward, _selected, 2),
    "latent": (
        latent._call,
        lambda: (rand(1, 2, 2, 5), rand(1, 4, 5), None, None, 3, 0.5, "eager"),
        2,
    ),
    "conv": (conv._call, _conv, 1),
    "norm": (norm._forward, _norm, 1),
    "matmul": (matmul._CALL, _matmul, 1),
    "glu": (glu.forward, lambda: (rand(3, 4), rand(3, 4), "silu", "eager"), 1),
    "embedding": (embedding._call, lambda: (IDS, rand(5, 3)), 1),
    "rotary": (rotary._call, lambda: _rotary(False), 1, 1),
    "rotary back": (rotary._call, lambda: _rotary(True), 1, 1),
    "token_shift": (token_shift._call, lambda: _shift(False), 2),
    "token_shift back": (token_shift._call, lambda: _shift(True), 2),
    "linear_cross_entropy": (loss._call_linear, _linear_loss, 1),
    "cross_entropy": (fused._call, lambda: (rand(4, 5), IDS, *LOSS, "eager"), 1),
    "linear_log_probs": (
        log_probs._forward,
        lambda: (rand(4, 3), rand(5, 3), rand(5), IDS, 0.7, -100, "eager"),
        2,
    ),
    "linear_kl_div": (distill._CALL, _distill, 1, 3),
    "decay_gate": (
        decay_gate._forward,
        lambda: (rand(1, 4, 2), rand(2), rand(2), None, "eager"),
        1,
    ),
    "mamba_terms": (
        mamba_terms._forward,
        lambda: (rand(1, 4, 2, 3), rand(1, 4, 2), *rand(2, 2), rand(2, 3), 0.0, 1e9, "eager"),
        3,
    ),
    "rwkv7_terms": (
        rwkv7._terms,
        lambda: (*(rand(1, 4, 6) for _ in range(6)), *rand(2, 6), *[None] * 3, 2, "eager"),
        5,
    ),
    "rwkv7_output": (
        rwkv7._output,
        lambda: (*_heads(4), rand(1, 4, 6), rand(6), rand(6), rand(2, 3), 1e-5, "eager"),
        1,
    ),
    "token_mix": (token_mix._forward, lambda: (*rand(2, 1, 4, 3), None, rand(2, 3), "eager"), 1),
    "mhc_pre": (
        hyper._pre,
        lambda: (rand(3, 2, 4), rand(8, 8), rand(8), rand(3), *MHC, True, "eager"),
        3,
    ),
    "mhc_post": (
        hyper._post,
        lambda: (rand(3, 2, 4), rand(3, 4), rand(3, 2), rand(3, 2, 2), "eager"),
        1,
    ),
    "index_loss": (index_loss._call, _index_loss, 1, 3),
    "erase": (erase._forward, lambda: (*rand(3, 1, 4, 2), "eager"), 1),
    "rotate_qk": (rotation._forward, lambda: (*rand(2, 1, 4, 2, 3), rand(1, 4, 1), "eager"), 3),
    "running_mean": (
        running_mean._mean,
        lambda: (*rand(2, 1, 4, 3), *rand(2, 3), rand(1, 6), None, True, "eager"),
        2,
    ),
    # these two compute in float32, and are looked at with less precision
    "slots": (gsa._call_forward, _slots, 3),
    "steps": (gated_delta_product._call_forward, _steps, 2),
}
every_row = pytest.mark.parametrize("name", ROWS)


def results_of(op: Any, args: tuple) -> tuple[Tensor, ...]:
    results = op(*args)
    return (results,) if isinstance(results, Tensor) else tuple(results)


def test_rows_are_all_operators_with_gradients() -> None:
    assert {op.overload for op, *_ in ROWS.values()} == set(autograd._GRADIENTS)


@every_row
def test_operator_has_the_gradient_of_differences(name: str) -> None:
    op, make, results, *count = ROWS[name]
    args = make()
    floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    floats = floats[: count[0]] if count else floats

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = list(args)
        for i, x in zip(floats, inputs):
            given[i] = x.to(args[i].dtype)
        return tuple(x.double() for x in results_of(op.overload, tuple(given))[:results])

    inputs = tuple(args[i].double().requires_grad_() for i in floats)
    wide = all(args[i].dtype == torch.float64 for i in floats)
    options = {} if wide else {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2}
    assert torch.autograd.gradcheck(run, inputs, check_undefined_grad=False, **options)


@every_row
def test_operator_gives_all_results_with_gradients_as_without(name: str) -> None:
    """Also those that only its own backward reads."""
    op, args = ROWS[name][0].overload, ROWS[name][1]()
    with torch.no_grad():
        want = results_of(op, args)
    leaves = [x.requires_grad_() for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    got = results_of(op, args)
    assert leaves and len(got) == len(want)
    torch.testing.assert_close(got, want)


def test_operator_without_a_gradient_refuses_its_backward() -> None:
    q, k, v = (torch.randn(1, n, 1, 4, requires_grad=True) for n in (1, 3, 3))
    args = (q, k, v, *[None] * 8, 0.5, -1, 0, 0.0, 0.0, "eager")
    o, _ = attention.call_decode.overload(*args)
    with torch.no_grad():
        want, _ = attention.call_decode.overload(*args)
    torch.testing.assert_close(o, want)
    with pytest.raises(NotImplementedError, match=r"slipstream\._softmax_decode.*no gradient"):
        o.sum().backward()


def test_further_results_refuse_their_backward() -> None:
    """The gradients that a loss makes in its forward have none of their own."""
    args = _linear_loss()
    args[0].requires_grad_()
    _, dhidden, *_ = loss._call_linear.overload(*args)
    with pytest.raises(NotImplementedError, match=r"slipstream\._linear_cross_entropy"):
        dhidden.sum().backward()


def test_forward_mode_is_a_transform() -> None:
    x = torch.randn(3)
    assert backends.is_plain_call(x) and not autograd.transformed()
    with forward_ad.dual_level():
        assert autograd.transformed() and not backends.is_plain_call(x)
