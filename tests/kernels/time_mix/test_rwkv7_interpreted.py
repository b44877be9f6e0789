"""The operators around RWKV-7's recurrence under Triton's interpreter, against float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.kernels.time_mix import rwkv7
from slipstream.kernels.time_mix.inputs import OutputInputs, TermsInputs
from tests.support.interpreted import error, interpreted


def compare(
    kernels: Callable[..., Sequence[Tensor]],
    plain: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> None:
    found, douts = [], []
    for call, as_dtype in ((kernels, dtype), (plain, torch.float64)):
        leaves = [x if x is None else x.to(dtype).to(as_dtype).requires_grad_() for x in inputs]
        ys = call(*leaves)
        douts = douts or [torch.randn(y.shape).to(y.dtype) for y in ys]
        given = [x for x in leaves if x is not None]
        grads = torch.autograd.grad(
            list(ys), given, [d.to(y.dtype) for d, y in zip(douts, ys, strict=True)]
        )
        with torch.no_grad():
            found.append([*ys, *grads, *call(*leaves)])
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert got.shape == want.shape, i
        assert error(got, want) < limit, ([x if x is None else x.shape for x in inputs], dtype, i)


def check(B: int, T: int, H: int, K: int, first: bool, dtype: torch.dtype) -> None:
    def tokens() -> Tensor:
        return torch.randn(B, T, H * K)

    w, k, a, gate = (tokens() for _ in range(4))
    values = (None, None, None) if first else (tokens(), tokens(), tokens())
    parameters = torch.rand(H * K), torch.rand(H * K)
    biases = torch.randn(H * K), torch.randn(H * K), None if first else torch.randn(H * K)

    def plain(*args: Any) -> list[Tensor]:
        found = rwkv7.plain_terms(TermsInputs(*args), H)
        return [*found, found[1], *found[4:]]

    for more in (biases, (None, None, None)):
        compare(
            lambda *args: rwkv7.recurrence_terms(TermsInputs(*args), H, "triton"),
            plain,
            (w, k, a, *values, *parameters, *more),
            dtype,
        )
    heads = [tokens().unflatten(-1, (H, K)) for _ in range(4)]
    others = torch.rand(H * K), torch.randn(H * K), torch.randn(H, K)
    for eps in (1e-3, 0.0):
        compare(
            lambda *args, eps=eps: [rwkv7.output(OutputInputs(*args), eps, "triton")],
            lambda *args, eps=eps: [rwkv7.plain_output(OutputInputs(*args), eps)],
            (*heads, gate, *others),
            dtype,
        )


def check_parts() -> None:
    """Gradients of some of the terms alone."""
    tokens = [torch.randn(2, 5, 8) for _ in range(6)] + [torch.rand(8), torch.rand(8)]
    for parts in ((0,), (1, 6), (5,), (4, 2)):
        found = []
        for impl in ("triton", "eager"):
            leaves = [x.clone().requires_grad_() for x in tokens]
            terms = rwkv7.recurrence_terms(TermsInputs(*leaves), 2, impl)
            loss = torch.stack([terms[i].sin().sum() for i in parts]).sum()
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            found.append([torch.zeros(1) if x is None else x for x in grads])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want.expand_as(got), rtol=1e-4, atol=1e-5)


class _NoZeros(TorchDispatchMode):
    """Nothing of the size of a tensor of tokens is filled."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "zeros" not in str(func) and "fill" not in str(func), func
        return func(*args, **(kwargs or {}))


def check_no_zeros() -> None:
    """Where all terms have gradients."""
    leaves = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(6)]
    leaves += [torch.rand(8, requires_grad=True) for _ in range(2)]
    terms = rwkv7.recurrence_terms(TermsInputs(*leaves), 2, "triton")
    douts = [torch.randn_like(x) for x in terms]
    with _NoZeros():
        torch.autograd.grad(terms, leaves, douts)


def check_operators() -> None:
    """Operators of torch.library, and the probe that stands before their kernels."""
    x, weight = torch.randn(2, 3, 8), torch.randn(8)
    terms: Any = (x, x.clone(), x.clone(), None, None, None, weight, weight.clone())
    terms += (weight.clone(), None, None, 2, "triton")
    heads = [torch.randn(2, 3, 2, 4) for _ in range(4)]
    output: Any = (*heads, x, weight, weight.clone(), torch.randn(2, 4), 1e-5, "triton")
    torch.library.opcheck(rwkv7._terms.overload, terms)
    torch.library.opcheck(rwkv7._terms_backward.overload, (*heads, None, None, None, *terms))
    torch.library.opcheck(rwkv7._output.overload, output)
    torch.library.opcheck(rwkv7._output.backward.overload, (x, *output))
    assert rwkv7._mismatch(x, weight, 2) is None


@interpreted
def test_triton_rwkv7_matches_formula() -> None:
    check(2, 7, 3, 20, False, torch.float32)
    check(1, 300, 2, 16, True, torch.float32)
    check(1, 5, 1, 130, False, torch.float32)
    check(2, 9, 2, 33, False, torch.float16)
    check_parts()
    check_no_zeros()
    check_operators()
