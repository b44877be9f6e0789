"""Layers in both directions on a CUDA device: sequences and blocks, outputs and every gradient
beside the same layer in float64 on a CPU, and which tokens a token sees."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.layers import Bidirectional, Mixer
from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM
from tests.support.small_layers import LAYERS, make

DEVICE = "cuda"

# one of each family of kernels; the second half at sizes that sm_90's kernels take
WIDE = {"hidden_size": 256, "num_heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "MultiScaleRetention",
        "GatedLinearAttention-grouped",
        "KimiDeltaAttention-bounded",
        "GatedDeltaNet-grouped",
        "GatedDeltaNet2",
        "PrecondKDA",
        "RWKV7",
        "RWKV6",
        "HGRN",
        "LightNetAttention",
        "Mamba2",
        "Mamba3-mimo",
        "Attention-grouped",
        "ForgettingAttention-grouped",
    )
}
CASES |= {
    f"{name}-wide": (name, WIDE)
    for name in ("GatedLinearAttention", "KimiDeltaAttention", "GatedDeltaNet", "Mamba2", "RWKV7")
}
# relative; in bfloat16 gradients of a few sums over all tokens
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.06}
every_case = pytest.mark.parametrize("case", CASES)
every_size = pytest.mark.parametrize("block_size", [None, 16])


def made(case: str, block_size: int | None, **options: Any) -> tuple[Bidirectional, int]:
    torch.manual_seed(0)
    name, given = CASES[case]
    layer: Mixer = make(name, **{**given, **options})
    return Bidirectional(layer, block_size=block_size), given.get("hidden_size", 24)


def results(
    layer: Bidirectional, x: Tensor, dy: Tensor, offsets: Tensor | None
) -> dict[str, Tensor]:
    x = x.requires_grad_()
    y, _ = layer(x, cu_seqlens=offsets)
    named = {"x": x, **dict(layer.named_parameters())}
    used = torch.autograd.grad(y, list(named.values()), dy, allow_unused=True)
    found = {n: g for n, g in zip(named, used) if g is not None}
    return {"y": y.detach(), **found}


def error(got: Tensor, want: Tensor) -> float:
    got = got.detach().double().cpu()
    e = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return e if e == e else float("inf")


@every_size
@every_case
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_both_directions_match_float64(case: str, block_size: int | None, packed: bool) -> None:
    dtype = torch.bfloat16 if case.endswith("wide") else torch.float32
    layer, width = made(case, block_size)
    layer = layer.to(DEVICE, dtype)
    offsets = torch.tensor([0, 5, 5, 96, 230], dtype=torch.int32) if packed else None
    shape = (1, 230, width) if packed else (2, 115, width)
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    on_device = None if offsets is None else offsets.to(DEVICE)
    got = results(layer, x.to(DEVICE), dy.to(DEVICE), on_device)
    want = results(layer.cpu().double(), x.double(), dy.double(), offsets)
    assert got.keys() == want.keys()
    # what cancels to nothing in float64 has no relative error
    names = [n for n in want if float(want[n].norm()) > 1e-6 * float(want["y"].norm())]
    wrong = {n: e for n in names if (e := error(got[n], want[n])) > LIMITS[dtype]}
    assert not wrong


@every_case
def test_blocks_see_themselves_whole_and_the_past(case: str) -> None:
    unbounded = {"window_size": None} if "window_size" in LAYERS[CASES[case][0]] else {}
    layer, width = made(case, 16, **unbounded)
    dtype = torch.bfloat16 if case.endswith("wide") else torch.float32
    layer = layer.to(DEVICE, dtype)
    x = torch.randn(2, 70, width, device=DEVICE, dtype=dtype).requires_grad_()
    y, _ = layer(x)
    for t in (0, 15, 16, 40, 69):
        (grad,) = torch.autograd.grad(y[:, t].float().square().sum(), x, retain_graph=True)
        seen = grad.abs().sum((0, 2)) > 0
        end = min(16 * (t // 16) + 16, 70)
        assert seen.tolist() == [s < end for s in range(70)]


@every_case
@torch.no_grad()
def test_blocks_go_on_from_a_state(case: str) -> None:
    """Two calls of whole blocks are one."""
    layer, width = made(case, 16)
    layer = layer.to(DEVICE)
    x = torch.randn(2, 91, width, device=DEVICE)
    whole, _ = layer(x, use_cache=True)
    first, state = layer(x[:, :48], use_cache=True)
    second, _ = layer(x[:, 48:], state=state, use_cache=True)
    assert error(torch.cat([first, second], 1), whole.double().cpu()) <= LIMITS[torch.float32]


@every_size
def test_models_have_mixers_of_both_directions(block_size: int | None) -> None:
    """A hybrid's loss and gradients are those of float64 on a CPU."""
    both = {"bidirectional": True, **({} if block_size is None else {"block_size": block_size})}
    kinds = ("gla", "gated_deltanet", "mamba2", "rwkv7", "rwkv7", "attention")
    config = SlipstreamConfig(
        vocab_size=61,
        hidden_size=64,
        num_heads=2,
        mixers=[{"type": kind, **both} for kind in kinds],
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model, ids = SlipstreamForCausalLM(config), torch.randint(0, 61, (2, 75))

    def found(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model.to(device, dtype).zero_grad()
        given = ids.to(device)
        loss = model(given, labels=given, use_cache=False).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}

    got, want = found(DEVICE, torch.float32), found("cpu", torch.float64)
    assert got.keys() == want.keys()
    wrong = {n: e for n in want if (e := error(got[n], want[n])) > 1e-3}
    assert not wrong
