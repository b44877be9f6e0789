"""RWKV-7's decoding step in one launch, on a GPU: beside float64, in a graph, and in a layer."""

import pytest
import torch

from slipstream.kernels.time_mix import rwkv7_step
from slipstream.layers import RWKV7
from tests.support.operators import relative_error
from tests.support.rwkv7_steps import check, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_matches_the_formula(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        check(rows, 16, 64, (64, 64, 128, 32), False, dtype)
        check(rows, 3, 128, (32, 40, 96), True, dtype)
        check(rows, 3, 20, (5, 64, 33, 32), False, dtype)


def test_captured_call_reads_what_is_there_then() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        t, state, shift = inputs(3, 4, 64, (32, 32, 64, 32), False)
    before = state.clone()
    rwkv7_step.step(t, state, shift, 1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rwkv7_step.step(t, state, shift, 1e-3)
    state.copy_(before)
    t.k.copy_(torch.randn_like(t.k))
    graph.replay()
    want = rwkv7_step.plain(t, before, shift, 1e-3)
    assert relative_error(y, want) < 1e-5 and relative_error(state, before) < 1e-5


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_layer_by_it_and_by_its_parts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = RWKV7(256, 4, layer_idx=1, num_layers=2).cuda().bfloat16().eval()
    for parameter in layer.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    x, first = (torch.randn(rows, n, 256, device="cuda").bfloat16() for n in (7, 7))
    found, made = [], []
    fused = RWKV7._fused_step
    for by_parts in (False, True):
        monkeypatch.setattr(
            RWKV7, "_fused_step", lambda *a, p=by_parts: None if p else made.append(1) or fused(*a)
        )
        _, state = layer(x[:, :5], use_cache=True, first_value=first[:, :5])
        outs = [layer.step(x[:, t : t + 1], state, first_value=first[:, t : t + 1]) for t in (5, 6)]
        found.append([*outs, *state.values()])
    assert len(made) == 2
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < 2e-2
