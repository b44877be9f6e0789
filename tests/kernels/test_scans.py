"""Both scans in plain torch: against the recurrence token by token, and against the paper. What
holds for every operator is in tests/ops/test_properties.py and test_compile.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.common import linear_rows
from slipstream.kernels.gated_scan import eager as gated
from slipstream.kernels.selective_scan.inputs import CHUNK
from slipstream.ops import chunk_hgrn, selective_scan
from tests.support.operators import scan_inputs

TOKENS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7)
C = gated.BLOCK
# around one block, two, where blocks begin to be used, and with tokens past the last block
BLOCK_TOKENS = [1, 2, C - 1, C, 2 * C - 1, 2 * C, 3 * C, 3 * C + 1, 5 * C - 1]


def gated_inputs(B: int = 2, T: int = 3 * C + 5, D: int = 6) -> dict[str, Tensor]:
    x, g = torch.randn(B, T, D).double(), -torch.rand(B, T, D).double()
    return {"x": x, "g": g, "initial_state": torch.randn(B, D).double()}


def inputs(
    B: int = 2,
    T: int = 2 * CHUNK + 5,
    G: int = 2,
    S: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    args = {name: x.to(dtype) for name, x in scan_inputs(B, T, 6, 3, G, S).items()}
    return {**args, "A": -args["A"].abs()}


def run(
    scan: Callable[..., Any], args: dict[str, Tensor], **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the inputs for fixed weights of both, and of each alone."""
    args = {name: x.detach().clone().requires_grad_() for name, x in args.items()}
    options |= {"delta_softplus": True} if scan is selective_scan else {}
    outputs = scan(**args, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    parts = [(x * w).sum() for x, w in zip(outputs, weights)]
    grads = []
    for loss in (sum(parts), *parts):
        grads += torch.autograd.grad(
            loss, list(args.values()), retain_graph=True, materialize_grads=True
        )
    return [x.detach() for x in outputs], grads


def near(got: Any, want: Any, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[True, False], ids=["parts", "whole"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated scan's spans of 24 C elements are two blocks of 2 x 6 channels; the other's
    segments are chunks."""
    monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", 24 * C if request.param else 1 << 20)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("T", BLOCK_TOKENS)
@pytest.mark.parametrize("reverse", [False, True])
def test_hgrn_matches_reference(T: int, reverse: bool) -> None:
    args = gated_inputs(T=T)
    want = run(chunk_hgrn, args, reverse=reverse, impl="reference")
    near(run(chunk_hgrn, args, reverse=reverse), want, 1e-12)


def test_selective_scan_is_the_papers_sum() -> None:
    """Unrolled: y_t = sum_{s <= t} C_t exp(A sum_{s < r <= t} dt_r) dt_s B_s u_s, and no state."""
    args = inputs(B=1, T=9, G=1)
    u, delta, A, B, C = (args[x] for x in ("u", "delta", "A", "B", "C"))
    dt = F.softplus(delta)
    sums = dt.cumsum(1)
    want = torch.zeros_like(u)
    for t in range(9):
        for s in range(t + 1):
            decay = ((sums[:, t] - sums[:, s])[..., None] * A).exp()
            part = C[:, t] * decay * B[:, s]
            want[:, t] += part.sum(-1) * dt[:, s] * u[:, s]
    got, _ = selective_scan(u, delta, A, B, C, delta_softplus=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("T", TOKENS)
def test_selective_scan_matches_reference(T: int) -> None:
    args = inputs(T=T)
    near(run(selective_scan, args), run(selective_scan, args, impl="reference"))


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("lengths", [(CHUNK + 8, 0, 3 * CHUNK, 1, CHUNK), (0, 0, 70, 0)])
def test_packed_selective_scan_matches_reference(lengths: tuple[int, ...]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    args = inputs(B=1, T=sum(lengths), S=len(lengths))
    want = run(selective_scan, args, cu_seqlens=cu_seqlens, impl="reference")
    near(run(selective_scan, args, cu_seqlens=cu_seqlens), want)


def test_selective_scan_survives_steps_that_forget_all() -> None:
    args = inputs(dtype=torch.float32)
    args["delta"] = torch.where(torch.rand_like(args["delta"]) < 0.3, 1e3, args["delta"])
    args["A"] = args["A"] - 1
    got, want = run(selective_scan, args), run(selective_scan, args, impl="reference")
    assert not any(x.isnan().any() for part in got for x in part)
    near(got, want, 1e-4)
