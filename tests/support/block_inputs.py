"""The inputs of a consistent model's step for a token, in one launch and part by part."""

from collections.abc import Callable
from typing import Any

import torch

from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.kernels.mixer_step.block_inputs import Blocks, TokenInputs
from slipstream.layers import GatedDeltaNet, KimiDeltaAttention
from slipstream.layers.delta_heads import DeltaHeads
from slipstream.ops._preprocess import beta_sigmoid
from slipstream.runtime.consistent import BlockStep, consistent

# layers, and the bound of their log decays
LAYERS: list[tuple[Callable[[], DeltaHeads], float | None]] = [
    (lambda: GatedDeltaNet(64, 2, head_dim=64, num_v_heads=4, conv_bias=True), None),
    (lambda: GatedDeltaNet(64, 1, head_dim=128, head_v_dim=40, allow_neg_eigval=True), None),
    (lambda: GatedDeltaNet(64, 1, head_dim=256), None),
    (lambda: KimiDeltaAttention(64, 2, head_dim=128), None),
    (lambda: KimiDeltaAttention(64, 1, head_dim=64, lower_bound=-5.0), -5.0),
]


def inputs(
    N: int, H: int, K: int, channels: tuple[int, ...] = (), bound: float | None = None
) -> tuple[TokenInputs, Blocks]:
    torch.manual_seed(0)
    width, T = 3 * H * K, 5
    sizes = [(N, 4, width), *[(N, T, H, K)] * 3, (N, T, H, *channels), (N, T, H)]
    blocks = Blocks._make(torch.randn(size) for size in sizes)
    x, weight, g = torch.randn(N, width), torch.randn(width, 4), torch.randn(N, H, *channels)
    A_log, dt_bias, beta = torch.randn(H), torch.randn(g[0].numel()), torch.randn(N, H)
    counts = torch.tensor([4, 0, 2] * N)[:N]
    return TokenInputs(x, weight, None, g, A_log, dt_bias, beta, counts, True, True, bound), blocks


@torch.no_grad()
def check_inputs(
    layer: DeltaHeads, lower_bound: float | None, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """One launch gives for a token the numbers that separate launches give."""
    from slipstream.kernels.elementwise.triton import decay_gate as gate

    torch.manual_seed(0)
    N, T, HV = 2, 64, layer.num_v_heads
    layer.to(device)
    conv: Any = layer.conv
    conv.to(dtype)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    x = torch.randn(N, T, layer.channels, **options)
    gates = (HV,) if layer.dt_bias.numel() == HV else (HV, layer.head_dim)
    raw, beta = (torch.randn(N, T, *n, **options) for n in (gates, (HV,)))
    past = torch.randn(N, layer.channels, 4, **options)
    sizes = (layer.keys, layer.keys, layer.values)

    def call(*inputs: torch.Tensor) -> list[torch.Tensor]:
        (q, k, v, *_), _ = conv.split(inputs[0], sizes, past, use_cache=True, unit=layer.head_dim)
        g = gate.forward(inputs[1], layer.A_log, layer.dt_bias, lower_bound)
        q, k = (y.unflatten(-1, (layer.num_heads, -1)) for y in (q, k))
        b = beta_sigmoid(inputs[2], True, layer.allow_neg_eigval)
        return [q, k, v.unflatten(-1, (HV, -1)), g, b]

    counts = torch.zeros(N, dtype=torch.int64, device=device)
    step = BlockStep(counts, place_tokens)
    with consistent():
        want = call(x, raw, beta)
        with step.running(fills=True):
            step.blocks(call(torch.randn_like(x), raw.sin(), beta.sin()))
        for t in range(5):
            counts.fill_(t)
            with step.running():
                now = slice(t, t + 1)
                placed = layer._block_terms(x[:, now], raw[:, now], beta[:, now], lower_bound)
                assert placed is not None
                for found, y in zip(step.blocks(placed[0]), want, strict=True):
                    # on a CPU what is compared with is plain torch
                    bar = 0.0 if device == "cuda" else 2e-3
                    torch.testing.assert_close(found[:, t], y[:, t], rtol=bar, atol=bar / 1e3)
        assert torch.equal(placed[1][:, :, -1], x[:, 4])
