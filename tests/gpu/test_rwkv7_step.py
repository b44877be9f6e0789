"""RWKV-7's decoding step on a GPU: its operators beside float64, in a graph, and in a layer."""

from typing import Any

import pytest
import torch

from slipstream.layers import RWKV7
from slipstream.layers import rwkv7 as layers
from slipstream.ops import rwkv7_step, token_mix_step
from tests.support import rwkv7_steps as steps
from tests.support.operators import relative_error
from tests.support.rwkv7_steps import Sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "K"), [(32, 64), (3, 128), (3, 20), (1, 200)])
def test_rwkv7_step_matches_the_formula(H: int, K: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        for pool_dtype in {torch.float32, dtype}:
            steps.check(Sizes(H, K, dtype=dtype, pool_dtype=pool_dtype), "triton")
        steps.check(Sizes(H, K, first=True, dtype=dtype), "triton", strength=20.0)
        steps.check_nobody_lives("triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixes_and_low_rank_products_match_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        for rows in (2, 65):
            for D, M in ((2048, 6), (600, 1)):
                steps.check_mixes(rows, D, M, dtype, dtype, "triton")
                steps.check_mixes(rows, D, M, dtype, torch.float32, "triton")
            steps.check_low_rank(rows, 2048, (96, 96, 256, 64), dtype, "triton")
            steps.check_low_rank(rows, 72, (5, 133, 32), dtype, "triton")


def test_captured_calls_read_what_is_there_then() -> None:
    """Slots too, of which some are none."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        args, at = steps.make(Sizes(K=64)), torch.tensor(steps.INDICES)
        x, mu, last = torch.randn(3, 64), torch.randn(6, 64), torch.randn(steps.SLOTS, 64)
    before = args["state"].clone(), last.clone()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        y = rwkv7_step(**args, state_indices=at, norm_eps=steps.EPS)
        return y, token_mix_step(x, mu, state=last, state_indices=at)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, mixes = call()
    args["state"].copy_(before[0])
    last.copy_(before[1])
    args["k"].copy_(torch.randn_like(args["k"]))
    at.copy_(torch.tensor([-1, 4, 1]))
    graph.replay()
    want, pool = steps.formula({**args, "state": before[0]}, (-1, 4, 1))
    assert relative_error(y, want) < 1e-5 and relative_error(args["state"], pool) < 1e-5
    assert torch.equal(last[[4, 1]], x[1:]) and torch.equal(last[[0, 2, 3]], before[1][[0, 2, 3]])
    assert not mixes[:, 0].any() and mixes[:, 1:].any()


@pytest.mark.parametrize("rows", [1, 3, 130])
@torch.no_grad()
def test_layer_by_them_and_by_its_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors beside the layer in float64 are at most 1.5 times those of the parts."""
    torch.manual_seed(0)
    layer: Any = RWKV7(256, 4, layer_idx=1, num_layers=2).cuda().bfloat16().eval()
    for parameter in layer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x, first = (torch.randn(rows, n, 256, device="cuda").bfloat16() for n in (7, 7))
    calls: list[int] = []
    step = layers.rwkv7_step
    monkeypatch.setattr(layers, "rwkv7_step", lambda *a, **b: calls.append(1) or step(*a, **b))
    found, fused = [], RWKV7._fused_step
    for kind in ("wide", "parts", "one"):
        if kind != "one":
            monkeypatch.setattr(RWKV7, "_fused_step", lambda *args: None)
        else:
            monkeypatch.setattr(RWKV7, "_fused_step", fused)
        to = ("cpu", torch.float64) if kind == "wide" else ("cuda", torch.bfloat16)
        layer, y, v = layer.to(*to), x.to(*to), first.to(*to)
        _, state = layer(y[:, :5], use_cache=True, first_value=v[:, :5])
        outs = [layer.step(y[:, t : t + 1], state, first_value=v[:, t : t + 1]) for t in (5, 6)]
        found.append([*outs, *state.values()])
    assert len(calls) == 2
    for want, parts, one in zip(*found, strict=True):
        assert relative_error(one.cpu(), want) <= 1.5 * relative_error(parts.cpu(), want)
