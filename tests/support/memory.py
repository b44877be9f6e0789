"""Bytes that calls allocate, and calls to count them of."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.kernels.linear.inputs import LinearInputs

# What kernels may leave for each other beyond arguments, results and gradients: so many bytes, or
# such a part of those.
PROMISED_BYTES, PROMISED_PART = 4 << 30, 1.0


def allowed(whole: float) -> float:
    """Bytes that are promised as the most beyond so many."""
    return max(PROMISED_BYTES, PROMISED_PART * whole)


_K = 128


class Allocated(TorchDispatchMode):
    """Bytes that live in storages made within it."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes = {x.untyped_storage()._cdata: 0 for x in known}

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._sizes:
                storage = x.untyped_storage()
                self._sizes[storage._cdata] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata)
        return out

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


Allocated.__torch_dispatch__ = Allocated.dispatch  # pyright: ignore


def make(kind: str, lengths: tuple[int, ...], H: int, device: torch.device) -> LinearInputs:
    T = sum(lengths)
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    each, wide = (T, H), (T, H, _K)
    given: dict[str, Tensor] = {}
    if kind == "gated":
        given["g"] = torch.empty(1, *each, device=device)
    if kind in ("kda", "dplr"):
        given["g"] = torch.empty(1, *wide, device=device)
    if kind in ("delta_rule", "gated", "kda"):
        given["beta"] = torch.empty(1, *each, device=device)
    else:
        given |= {name: torch.empty(1, *wide, **like) for name in "ab"}
    if len(lengths) > 1:
        given["cu_seqlens"] = torch.empty(len(lengths) + 1, device=device, dtype=torch.int32)
    return LinearInputs(*(torch.empty(1, *wide, **like) for _ in "qkv"), **given)
