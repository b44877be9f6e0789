"""The scan h_t = exp(g_t) h_{t-1} + x_t: its blocks and spans, registration.

What holds for every operator is in tests/ops/test_properties.py and test_compile.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.gated_scan import eager
from slipstream.ops import chunk_hgrn

C = eager.BLOCK
# around one block, two, where blocks begin to be used, and with tokens past the last block
TOKENS = [1, 2, C - 1, C, 2 * C - 1, 2 * C, 3 * C, 3 * C + 1, 5 * C - 1]


def inputs(
    B: int = 2, T: int = 3 * C + 5, D: int = 6, N: int | None = None, dtype: Any = torch.float64
) -> dict[str, Any]:
    return {
        "x": torch.randn(B, T, D, dtype=dtype),
        "g": -torch.rand(B, T, D, dtype=dtype),
        "initial_state": torch.randn(B if N is None else N, D, dtype=dtype),
    }


def run(args: dict[str, Any], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """h and final state; gradients of the inputs for fixed weights of both, and of each alone."""
    args = {n: x.detach().clone().requires_grad_() for n, x in args.items()}
    h, final = chunk_hgrn(**args, output_final_state=True, **options)
    assert final is not None
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (h, final)]
    parts = (h * weights[0]).sum(), (final * weights[1]).sum()
    grads = []
    for loss in (sum(parts), *parts):
        grads += torch.autograd.grad(
            loss, list(args.values()), retain_graph=True, materialize_grads=True
        )
    return [h.detach(), final.detach()], grads


def near(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    for pair in zip(got, want, strict=True):
        for x, y in zip(*pair, strict=True):
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[1 << 20, 24 * C], ids=["one span", "spans"])
def span(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 C elements are two blocks of 2 x 6 channels."""
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("span")
@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("reverse", [False, True])
def test_hgrn_matches_reference(T: int, reverse: bool) -> None:
    args = inputs(T=T)
    near(run(args, reverse=reverse), run(args, reverse=reverse, impl="reference"))


def test_hgrn_sequences_do_not_see_one_another() -> None:
    args = inputs(B=3)
    both, _ = chunk_hgrn(**args)
    for b in range(3):
        alone, _ = chunk_hgrn(**{n: x[b : b + 1] for n, x in args.items()})
        assert torch.equal(alone, both[b : b + 1])
    args["x"][1] = torch.nan
    h, _ = chunk_hgrn(**args)
    assert torch.equal(h[::2], both[::2])
