"""Registration of operators with torch.library, in one namespace.

An operator is `define`d with one implementation for CPU and CUDA and a fake one that only makes
outputs of the right shape; gradients are an autograd.Function outside of it. So eager mode,
torch.compile(fullgraph=True) and torch.export all see one opaque node and never look inside.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "slipstream"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def _without_autocast(impl: Callable, device: str) -> Callable:
    """Autocast would reach the torch operations inside; dtypes are decided before the boundary."""

    def call(*args: Any) -> Any:
        if not torch.is_autocast_enabled(device):
            return impl(*args)
        with torch.autocast(device, enabled=False):
            return impl(*args)

    return call


def define(name: str, schema: str, impl: Callable, fake: Callable) -> Any:
    """Registers slipstream::name and returns its overload, bound once for cheap calls.

    Args:
        schema: arguments and returns as torch.library wants them, "(Tensor x) -> Tensor".
        impl: called on CPU and CUDA tensors, below autograd; outputs must not alias inputs.
        fake: the same arguments, shapes only; its strides must be those of `impl`.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _without_autocast(impl, key.lower()), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
