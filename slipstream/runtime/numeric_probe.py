"""Do kernels and plain torch agree on a small fresh problem? Outputs and gradients, within a
bar that rounding stays below and a wrong tile does not."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Relative errors, root mean square: of outputs, of gradients. In 16 bits the inputs' own rounding
# is not in it: plain torch gets the rounded ones.
BARS = {torch.float32: (1e-4, 1e-3), torch.float16: (5e-3, 2e-2), torch.bfloat16: (2e-2, 5e-2)}

Given = Mapping[str, Any]


def mismatch(
    kernels: Callable[[Given], Any],
    plain: Callable[[Given], Any],
    given: Given,
    gradients: bool = True,
    minimum_bar: float = 0.0,
) -> str | None:
    """The difference between two functions' outputs (a tensor, or several) and gradients, or None.

    `plain` gets the floating ones of `given` in float32. minimum_bar: of outputs, where they are
    rounded to less than their dtype.
    """
    dtype = next(x.dtype for x in given.values() if x is not None and x.is_floating_point())
    output_bar, gradient_bar = BARS[dtype]
    output_bar = max(output_bar, minimum_bar)
    with torch.set_grad_enabled(gradients):
        got = _run(kernels, {name: _leaf(x, None) for name, x in given.items()}, None)
        want = _run(plain, {n: _leaf(x, torch.float32) for n, x in given.items()}, got[1])
    pairs = [
        (f"output {i}", x, y, output_bar)
        for i, (x, y) in enumerate(zip(got[0], want[0], strict=True))
    ]
    pairs += [(f"gradient of {n}", got[2][n], want[2][n], gradient_bar) for n in want[2]]
    for name, x, y, bar in pairs:
        error = relative_error(x, y)
        if not error <= bar:
            return f"{name} is off by {error:.1e} of its size, at most {bar:.0e} is rounding"
    return None


def _run(
    call: Callable[[Given], Any], given: Given, douts: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs, what came into them, gradients by name."""
    out = call(given)
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    wanted = [x for x in outs if x.requires_grad]
    if douts is None:
        douts = [torch.randn_like(x) for x in wanted]
    leaves = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    grads = []
    if wanted:
        douts_of = [d.to(x.dtype) for d, x in zip(douts, wanted)]
        grads = torch.autograd.grad(wanted, list(leaves.values()), douts_of, allow_unused=True)
    named = {name: x for name, x in zip(leaves, grads) if x is not None}
    return [x.detach() for x in outs], douts, named


def _leaf(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`. Infinities that are the same differ
    by 0, as the log-sum-exp of a query that sees no key; nan, which no bar admits, where got has
    one."""
    got, want = got.float(), want.float()
    same = (got == want) & want.isinf()
    difference = (got - want).masked_fill(same, 0.0)
    size = want.masked_fill(same, 0.0).square().mean().sqrt().clamp(min=1e-20)
    return (difference.square().mean().sqrt() / size).item()


def random_like(x: Tensor, *shape: int) -> Tensor:
    """Normal numbers of x's dtype, on its device."""
    return torch.randn(*shape, device=x.device).to(x.dtype)
