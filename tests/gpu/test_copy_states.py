"""Copies of states by their indices on a GPU: the kernel against a loop, and in a graph."""

import pytest
import torch
import torch.nn.functional as F

from slipstream.integrations.serving import prefill
from slipstream.ops import chunk_kda
from tests.support.state_copies import SIZE, check_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("size", [SIZE, (4, 128, 128)])
def test_states_are_copied_by_the_kernel(size: tuple[int, int, int]) -> None:
    for _ in range(3):  # the third call of a kind is replayed
        check_copies("triton", "cuda", size)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_prefill_reads_new_slots(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 74, 2, 128, device="cuda").bfloat16() for _ in range(3))
    g, beta = -torch.rand(1, 74, 2, 128, device="cuda"), torch.rand(1, 74, 2, device="cuda")
    terms = F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta
    states = torch.randn(6, 2, 128, 128, device="cuda").to(dtype)
    cu, slots = torch.tensor([0, 3, 73, 74]).int().cuda(), torch.tensor([4, -1, 1]).cuda()

    def call() -> torch.Tensor:
        return prefill(chunk_kda, *terms, states=states, slots=slots, cu_seqlens=cu)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for at in ([4, -1, 1], [0, 2, 5], [-1, -1, -1], [3, 0, -2]):
        slots.copy_(torch.tensor(at))
        before = states.clone()
        graph.replay()
        after = states.clone()
        given = torch.stack([before[s].float() if s >= 0 else 0 * before[0].float() for s in at])
        options = {"state_v_first": True, "output_final_state": True, "cu_seqlens": cu}
        want, final = chunk_kda(*terms, initial_state=given, **options)
        assert torch.equal(found, want) and final is not None
        for slot, state in zip(at, final):
            if slot >= 0:
                before[slot] = state.to(dtype)
        assert torch.equal(after, before)
