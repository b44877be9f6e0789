"""Do GPU kernels and plain torch agree on a small fresh problem of the same kind as a call?

For runtime/guarded_launch.py's numeric probe, on compilers that are not verified.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from slipstream.kernels.linear.inputs import TERMS, ForwardCall, LinearInputs
from slipstream.runtime import kernel_pair


def _unit(shape: list[int], device: torch.device) -> Tensor:
    return normalize(torch.randn(shape, device=device), dim=-1)


# of Term.values
_VALUES: dict[str, Callable[[list[int], torch.device], Tensor]] = {
    "unit": _unit,
    "normal": lambda shape, device: torch.randn(shape, device=device),
    "rate": lambda shape, device: torch.rand(shape, device=device),
    "log decay": lambda shape, device: -0.1 * torch.rand(shape, device=device),
    "erasing": lambda shape, device: -0.5 * _unit(shape, device),
    "state": lambda shape, device: 0.1 * torch.randn(shape, device=device),
}


def mismatch(terms: LinearInputs, impl: str, by_token: bool, linear: Callable) -> str | None:
    """The difference between `impl`'s forward and backward and plain torch's, or None.

    Args:
        linear: takes terms and a ForwardCall.
    """
    tiny = like(terms, 9 if by_token else kernel_pair.TOKENS)
    scale, chunk = tiny.q.shape[-1] ** -0.5, 0 if by_token else 32

    def run(impl: str) -> Callable[[kernel_pair.Given], Any]:
        how = ForwardCall(scale, chunk, impl)
        return lambda given: linear(LinearInputs(**given), how)

    return kernel_pair.mismatch(
        run(f"{impl}|eager"), run("eager"), tiny._asdict(), gradients=not by_token
    )


def like(terms: LinearInputs, tokens: int = kernel_pair.TOKENS) -> LinearInputs:
    """Fresh terms of the same widths, dtypes and kind: one row of tokens, one or two heads."""
    sizes, cu, device = terms.sizes, terms.cu_seqlens, terms.q.device
    H = min(2, sizes["H"])
    HV = H * (sizes["HV"] // sizes["H"])
    sizes |= {"B": 1, "T": tokens, "H": H, "HV": HV, "N": 1 if cu is None else 2}
    found: dict[str, Any] = {}
    for name, term in TERMS.items():
        if (x := getattr(terms, name)) is not None:
            shape = [sizes[d] for d in term.dims_of(x.dim())]
            made = _VALUES[term.values](shape, device)
            found[name] = made if term.values == "state" else made.to(x.dtype)
    if cu is not None:
        found["cu_seqlens"] = torch.tensor([0, tokens // 3, tokens], dtype=cu.dtype, device=device)
    return LinearInputs(**found)
