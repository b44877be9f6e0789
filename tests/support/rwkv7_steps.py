"""RWKV-7's decoding step in one launch, against float64, and the layer by it beside its own parts.

TRITON_INTERPRET=1 python -m tests.support.rwkv7_steps
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.time_mix import rwkv7_step
from slipstream.kernels.time_mix.rwkv7_step import StepInputs
from slipstream.layers import RWKV7
from slipstream.layers import rwkv7 as layers
from slipstream.nn import projections
from tests.support.interpreted import error


def inputs(
    N: int, H: int, K: int, ranks: tuple[int, ...], first: bool
) -> tuple[StepInputs, Tensor, Tensor]:
    """And the state and the token before."""
    D = H * K
    tokens = {name: torch.randn(N, 2 * D)[:, :D] for name in ("x", "r", "k", "v")}
    inner = {name: torch.randn(N, n) for name, n in zip(("w", "a", "g", "v_gate"), ranks)}
    up = {f"{x.split('_')[0]}_up": torch.randn(y.shape[1], D) for x, y in inner.items()}
    given = {**tokens, **inner, **{n: x * x.shape[0] ** -0.5 for n, x in up.items()}}
    names = ("w_bias", "a_bias", "v_bias", "k_k", "k_a", "weight", "bias")
    given |= {name: torch.randn(D) for name in names}
    given |= {"first_value": torch.randn(N, D), "r_k": torch.randn(H, K)}
    missing = ("v_gate", "first_value", "v_up", "v_bias") if first else ()
    found = StepInputs._make(None if x in missing else given[x] for x in StepInputs._fields)
    return found, torch.randn(N, H, K, K), torch.randn(N, D)


def check(N: int, H: int, K: int, ranks: tuple[int, ...], first: bool, dtype: torch.dtype) -> None:
    given, state, shift = inputs(N, H, K, ranks, first)
    tokens = len(rwkv7_step.TOKENS)
    narrow = [
        x if x is None or (i >= tokens and dtype == torch.float32) else x.to(dtype)
        for i, x in enumerate(given)
    ]
    t = StepInputs._make(narrow)
    wide = StepInputs._make(x if x is None else x.double() for x in t)
    exact, last = state.double(), shift.double()
    want = rwkv7_step.plain(wide, exact, last, 1e-3)
    for impl in ("triton", "eager"):
        S, after = state.clone(), shift.to(dtype)
        y = rwkv7_step.step(t, S, after, 1e-3, impl)
        assert rwkv7_step.unsupported_reason(t, S) is None
        limit = 2e-5 if dtype == torch.float32 else 5e-3
        assert y.dtype == dtype and error(y, want) < limit, (impl, N, H, K, ranks, error(y, want))
        assert error(S, exact) < 2e-5 and torch.equal(after, t.x), impl


@torch.no_grad()
def check_layer() -> None:
    """Two tokens of a first layer and of a later one, by one launch and by parts."""
    calls, step = [], rwkv7_step.step
    rwkv7_step.step = lambda *args: calls.append(1) or step(*args)
    # which is not chosen on a CPU by itself
    layers.mixed_projections = partial(layers.mixed_projections, impl="triton")
    for layer_idx, first in ((0, None), (1, torch.randn(3, 1, 32))):
        layer = RWKV7(32, 2, layer_idx=layer_idx, num_layers=2).eval()
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        x, found = torch.randn(3, 7, 32), []
        for on_device in (False, True):
            projections._on_device = lambda x, on=on_device: on
            begun = None if first is None else first.expand(-1, 5, -1)
            _, state = layer(x[:, :5], use_cache=True, first_value=begun)
            options: dict[str, Any] = (
                {"output_value": True} if first is None else {"first_value": first}
            )
            outs = [layer.step(x[:, t : t + 1], state, **options) for t in (5, 6)]
            found.append([*(outs if first is not None else sum(outs, ())), *state.values()])
        for i, (got, want) in enumerate(zip(*found, strict=True)):
            assert got.shape == want.shape and error(got, want.double()) < 2e-5, (layer_idx, i)
    assert len(calls) == 4


def refused() -> list[str | None]:
    given, state, _ = inputs(2, 2, 16, (5, 5, 5, 5), False)
    return [
        rwkv7_step.unsupported_reason(given, x)
        for x in (state.bfloat16(), state.mT, torch.zeros(2, 1, 256, 256))
    ]


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        check(3, 2, 64, (32, 40, 96, 7), False, dtype)
        check(2, 3, 20, (5, 64, 33, 32), False, dtype)
        check(1, 1, 128, (32, 32, 32), True, dtype)
    check_layer()
    assert all(refused())


if __name__ == "__main__":
    main()
