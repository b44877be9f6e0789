"""slipstream.integrations for engines on a GPU: Mamba's states by block, also in a CUDA graph, and
SGLang's and vLLM's calls as tests/integrations has them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slipstream.integrations import vllm
from tests.gpu.waiting import graph_of
from tests.support.serving_checks import CHECKS, sglang_snapshots
from tests.support.serving_peers import mamba_calls


@pytest.fixture
def on_cuda() -> Iterator[None]:
    with torch.device("cuda"):
        yield


def on_device(x: Any) -> Any:
    """A tensor on the GPU, expanded as it was."""
    if not isinstance(x, torch.Tensor):
        return x
    once = x
    for d in range(x.dim()):
        once = once if x.stride(d) else once.narrow(d, 0, 1)
    return once.cuda().expand(x.shape)


@pytest.mark.parametrize("index", range(5))
def test_mamba_states_in_a_graph(index: int) -> None:
    _, terms, options = mamba_calls()[index]
    cpu = {name: x.clone() for name, x in terms.items()}
    want = torch.zeros_like(cpu["x"])
    vllm.selective_state_update(**cpu, **options, out=want)
    given = {name: on_device(x) for name, x in {**terms, **options}.items()}
    pool, got = given["state"].clone(), torch.zeros_like(want, device="cuda")
    vllm.selective_state_update(**given, out=got)
    torch.testing.assert_close(got.cpu(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(given["state"].cpu(), cpu["state"], atol=2e-5, rtol=2e-5)
    first, left = got.clone(), given["state"].clone()
    graph, _ = graph_of(lambda: vllm.selective_state_update(**given, out=got))
    given["state"].copy_(pool)
    graph.replay()
    assert torch.equal(got, first) and torch.equal(given["state"], left)


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_calls_of_engines(check: Callable[[bool], None], is_kda: bool, on_cuda: None) -> None:
    check(is_kda)


@pytest.mark.parametrize("is_kda", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots(is_kda: bool, dtype: torch.dtype, on_cuda: None) -> None:
    sglang_snapshots(is_kda, dtype)
