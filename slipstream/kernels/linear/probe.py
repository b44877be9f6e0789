"""Do GPU kernels and plain torch agree on a small fresh problem of the same kind as a call?

For runtime/guarded_launch.py's numeric probe, on compilers that nobody has verified.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime import numeric_probe

# of a probe in chunks, and token by token
TOKENS, RECURRENT_TOKENS = 150, 9
CHUNK = 32


def mismatch(terms: LinearInputs, impl: str, by_token: bool, linear: Callable) -> str | None:
    """What differs between `impl`'s forward and backward and plain torch's, or None.

    Args:
        linear: takes terms, scale, chunk and names of implementations.
    """
    tiny = like(terms, RECURRENT_TOKENS if by_token else TOKENS)
    scale, chunk = tiny.q.shape[-1] ** -0.5, 0 if by_token else CHUNK

    def run(impl: str) -> Callable[[numeric_probe.Given], Any]:
        return lambda given: linear(LinearInputs(**given), scale, chunk, impl)

    return numeric_probe.mismatch(
        run(f"{impl}|eager"), run("eager"), tiny._asdict(), gradients=not by_token
    )


def like(terms: LinearInputs, tokens: int = TOKENS) -> LinearInputs:
    """Fresh terms of the same widths, dtypes and kind: one row of tokens, one or two heads."""
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
        "erase": lambda shape: torch.rand(shape, device=device),
        "write": lambda shape: torch.rand(shape, device=device),
        "b": lambda shape: -0.5 * normalize(torch.randn(shape, device=device), dim=-1),
        "v": lambda shape: torch.randn(shape, device=device),
        "u": lambda shape: torch.randn(shape, device=device),
    }
    found: dict[str, Any] = {}
    for name, x in terms._asdict().items():
        if x is None or name in ("cu_seqlens", "initial_state"):
            continue
        heads = H if name in "qkpab" else HV
        shape = [HV, K] if name == "u" else [1, tokens, heads, *x.shape[3:]]
        make = makers.get(name, lambda s: normalize(torch.randn(s, device=device), dim=-1))
        found[name] = make(shape).to(x.dtype)
    if terms.initial_state is not None:
        found["initial_state"] = 0.1 * torch.randn(sequences, HV, K, V, device=device)
    if cu is not None:
        found["cu_seqlens"] = torch.tensor([0, tokens // 3, tokens], dtype=cu.dtype, device=device)
    return LinearInputs(**found)
