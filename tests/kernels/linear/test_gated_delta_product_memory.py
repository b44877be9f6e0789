"""Householder steps on sm_90, without a GPU: their memory, and that they are replayed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.compiler.trace import trace
from slipstream.kernels.linear import gated_delta_product
from slipstream.runtime import call_replay
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.memory import Allocated, allowed

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
WIDTH = 128
EMPTY = [f"aten::{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided")]
OPTIONS = (0.1, 64, "sm90")
# heads of keys and of values, tokens, steps a token
CASES = [
    (32, 32, 8192, 2),
    (32, 32, 32768, 2),
    (32, 32, 65536, 2),
    (96, 96, 8192, 2),
    (96, 96, 4096, 3),
]


class Counted(Allocated):
    """Also operations that a record counts: neither fresh memory nor views."""

    operations = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().dispatch(func, types, args, kwargs)
        if func.namespace == "aten":  # the others are of fake tensors
            assert isinstance(out, Tensor), f"{func} cannot be recorded"
            self.operations += func._schema.name not in EMPTY and not out._is_view()
        return out


Counted.__torch_dispatch__ = Counted.dispatch  # pyright: ignore


def steps(case: tuple[int, ...], device: torch.device) -> gated_delta_product.Steps:
    H, HV, T, n = case
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return gated_delta_product.Steps(
        torch.empty(1, T, H, WIDTH, **like),
        torch.empty(1, T * n, H, WIDTH, **like),
        torch.empty(1, T * n, HV, WIDTH, **like),
        torch.empty(1, T * n, HV, **like),
        torch.empty(1, T, HV, device=device),
    )


def found(case: tuple[int, ...], trained: bool) -> tuple[float, int]:
    """Memory beyond, as a part of what is promised, and operations of the last pass."""
    results: list[tuple[float, int]] = []

    def call(device: torch.device) -> None:
        given = steps(case, device)
        tensors = [x for x in given if x is not None]
        with Counted(tensors) as seen:
            o, final = gated_delta_product._forward(*given, *OPTIONS)
            outs, before = [o, final], 0
            if trained:
                outs, before = [o, torch.empty_like(o)], seen.operations
                outs += gated_delta_product._backward(*given, outs[1], None, *OPTIONS)
        made = sum(x.nbytes for x in outs)
        whole = made + sum(x.nbytes for x in tensors)
        results.append(((seen.peak - made) / allowed(whole), seen.operations - before))

    trace(call, "sm_90", backward=False)
    return results[0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_steps_take_what_is_allowed_and_are_replayed(case: tuple[int, ...], trained: bool) -> None:
    share, operations = found(case, trained)
    assert share <= 1
    assert operations <= call_replay.MAX_OPERATIONS
