"""Do GPU kernels and plain torch agree on a small fresh problem of the same kind as a call?

For core/guard.py's numeric probe, on compilers that nobody has verified.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from slipstream.kernels.linear.eager.chunk import chunk_forward
from slipstream.kernels.linear.eager.chunk_backward import chunk_backward
from slipstream.kernels.linear.terms import DIFFERENTIABLE, Terms

TOKENS = 150
CHUNK = 32
# Relative errors, root mean square: of o and the state, of gradients.
BARS = {torch.float32: (1e-4, 1e-3), torch.float16: (5e-3, 2e-2), torch.bfloat16: (2e-2, 5e-2)}


def variant(terms: Terms) -> str:
    """What the result of a probe holds for."""
    given = "".join(name + " " for name, x in terms._asdict().items() if x is not None)
    return f"{given}{terms.q.dtype} {terms.q.shape[-1]}x{terms.v.shape[-1]} {terms.decay}"


def mismatch(terms: Terms, launch: Any) -> str | None:
    """What differs between `launch`'s forward and backward and plain torch's, or None.

    Args:
        launch: has forward(terms, scale) and backward(terms, dout, dfinal, scale).
    """
    tiny = like(terms)
    scale = terms.q.shape[-1] ** -0.5
    o, final = launch.forward(tiny, scale)
    do, dfinal = torch.randn_like(o), 0.1 * torch.randn_like(final)
    grads = launch.backward(tiny, do, dfinal, scale)
    widened: Any = (None if x is None else _widened(x) for x in tiny)
    wide = Terms(*widened)
    want_o, want_final = chunk_forward(wide, scale, CHUNK)
    want = chunk_backward(wide, do.float(), dfinal.float(), scale, CHUNK)
    bars = BARS[tiny.q.dtype]
    pairs = [("o", o, want_o, bars[0]), ("final state", final, want_final, bars[0])]
    pairs += [(f"gradient of {x}", grads[x], want[x], bars[1]) for x in DIFFERENTIABLE if x in want]
    for name, got, expected, bar in pairs:
        error = _error(got, expected)
        if not error <= bar:
            return f"{name} is off by {error:.1e} of its size, at most {bar:.0e} is rounding"
    return None


def like(terms: Terms) -> Terms:
    """Fresh terms of the same widths, dtypes and kind, with TOKENS tokens and one or two heads."""
    H = min(2, terms.q.shape[2])
    HV = H * (terms.v.shape[2] // terms.q.shape[2])
    K, V = terms.q.shape[-1], terms.v.shape[-1]
    cu = terms.cu_seqlens
    sequences = 1 if cu is None else 2
    device = terms.q.device
    makers: dict[str, Callable[[list[int]], Tensor]] = {
        "g": lambda shape: -0.1 * torch.rand(shape, device=device),
        "gv": lambda shape: -0.1 * torch.rand(shape, device=device),
        "beta": lambda shape: torch.rand(shape, device=device),
        "b": lambda shape: -0.5 * normalize(torch.randn(shape, device=device), dim=-1),
        "v": lambda shape: torch.randn(shape, device=device),
        "u": lambda shape: torch.randn(shape, device=device),
    }
    found: dict[str, Any] = {}
    for name, x in terms._asdict().items():
        if x is None or name in ("cu_seqlens", "initial_state"):
            continue
        heads = H if name in "qkpab" else HV
        shape = [HV, K] if name == "u" else [1, TOKENS, heads, *x.shape[3:]]
        make = makers.get(name, lambda s: normalize(torch.randn(s, device=device), dim=-1))
        found[name] = make(shape).to(x.dtype)
    if terms.initial_state is not None:
        found["initial_state"] = 0.1 * torch.randn(sequences, HV, K, V, device=device)
    if cu is not None:
        cuts = torch.tensor([0, TOKENS // 3, TOKENS], dtype=cu.dtype)
        found["cu_seqlens"] = cuts.to(device)
    return Terms(**found)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _error(got: Tensor, want: Tensor) -> float:
    """nan, which is no less than any bar, where got has one."""
    size = want.float().square().mean().sqrt().clamp(min=1e-20)
    return ((got.float() - want.float()).square().mean().sqrt() / size).item()
