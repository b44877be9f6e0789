"""A gated MLP whose activation is in its products' kernels, on sm_90: outputs and gradients against
float64 at sizes that are no multiples of a tile, the same bits twice, rows that begin anywhere,
within activation checkpointing, and no host sync. What may be read of memory that nobody has
written is NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.kernels.elementwise import glu_mlp as gated_mlp
from slipstream.nn import GatedMLP

SM_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not SM_90, reason="needs an sm_90 device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    # what it is compared with
    pytest.mark.filterwarnings("ignore:glu runs in plain torch"),
]
BF16, FP16 = torch.bfloat16, torch.float16
# rows, D, F
SIZES = [(32768, 1024, 2752), (16300, 520, 776), (17000, 72, 264)]


def run(mlp: GatedMLP, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = mlp(x)
    return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], dy)]


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    off = (got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
    return float(off.nan_to_num(float("inf")))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By what the products are made."""
    from slipstream.kernels.elementwise.sm90 import glu as launch

    seen: list[str] = []
    run = launch.products

    def counted(*args: Any) -> Any:
        if len(args[0]) > 1000:  # not the probe's
            seen.append("products")
        return run(*args)

    monkeypatch.setattr(launch, "products", counted)
    monkeypatch.setattr("slipstream.runtime.call_replay.ENABLED", False)
    return seen


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "sigmoid_glu"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size", SIZES)
def test_beside_float64(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    activation: str,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    M, D, F = size
    torch.manual_seed(0)
    with torch.device("cuda"):
        mlp, exact = GatedMLP(D, F, activation).to(dtype), GatedMLP(D, F, activation).double()
        x, dy = torch.randn(2, M // 2, D).to(dtype), torch.randn(2, M // 2, D).to(dtype)
    exact.load_state_dict(mlp.state_dict())
    got, again = run(mlp, x, dy), run(mlp, x, dy)
    assert len(calls) == 2
    assert all(map(torch.equal, got, again))
    monkeypatch.setenv("SLIPSTREAM_FALLBACK", "warn")  # float64 has no kernel
    wants = run(exact, x.double(), dy.double())
    bar = 8e-3 if dtype == BF16 else 1e-3
    errors = [error(x, y) for x, y in zip(got, wants)]
    assert max(errors) < bar, errors


def test_rows_that_begin_anywhere_and_checkpointing(calls: list[str]) -> None:
    with torch.device("cuda"):
        mlp, wide = GatedMLP(512, 1408).to(BF16), torch.randn(20000, 515).to(BF16)
        dy = torch.randn(20000, 512).to(BF16)
    want = run(mlp, wide[:, 3:].contiguous(), dy)
    got = run(mlp, wide[:, 3:], dy)
    assert all(map(torch.equal, got, want))
    x = wide[:, 3:].contiguous().requires_grad_()
    y: Any = checkpoint(mlp, x, use_reentrant=False)
    kept = [y, *torch.autograd.grad(y, [x, *mlp.parameters()], dy)]
    assert all(map(torch.equal, kept, want)) and len(calls) == 4


def test_no_host_sync() -> None:
    with torch.device("cuda"):
        mlp, x, dy = GatedMLP(512, 1408).to(BF16), torch.randn(20000, 512), torch.randn(20000, 512)
    run(mlp, x.to(BF16), dy.to(BF16))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run(mlp, x.to(BF16), dy.to(BF16))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_few_rows_are_refused() -> None:
    with torch.device("cuda"):
        mlp, x = GatedMLP(512, 1408).to(BF16), torch.randn(20000, 512).to(BF16)
    weights = [getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down")]
    assert gated_mlp.unsupported_reason(x, *weights, "silu") is None
    assert "fewer" in (gated_mlp.unsupported_reason(x[:128], *weights, "silu") or "")
