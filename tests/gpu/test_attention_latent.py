"""Attention to a cache of latents, and the MLA layer, on a GPU beside float64 on the CPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.latent import eager_latent_attention, latent_attention
from slipstream.layers.mla import MLA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
# B, T, S, H, page, width, rest
CALLS = {
    "rows": (2, 1, 700, 16, 0, 512, 64),
    "rows, many heads": (3, 1, 1500, 128, 0, 512, 64),
    "rows, two tokens": (3, 2, 333, 7, 0, 512, 64),
    "pages of 64": (3, 1, 960, 128, 64, 512, 64),
    "pages of 16": (3, 3, 480, 16, 16, 512, 64),
    "pages of 30": (3, 1, 480, 128, 30, 512, 64),
    "narrow": (2, 2, 90, 5, 0, 100, 20),
}
every_call = pytest.mark.parametrize("name", CALLS)


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int]:
    B, T, S, H, page, width, rest = CALLS[name]
    q = torch.randn(B, T, H, width + rest).bfloat16()
    table = torch.randperm(B * S // page).int().view(B, -1) if page else None
    latent = torch.randn(*((B * S // page, page) if page else (B, S)), width + rest).bfloat16()
    return q, latent, torch.tensor([S, T, 77][:B]), table, width


def on_gpu(name: str) -> tuple[Any, ...]:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in inputs(name))


def error(got: Tensor, want: Tensor) -> float:
    got = got.detach().cpu().double()
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_call
def test_latent_attention_matches_reference(name: str, dtype: torch.dtype) -> None:
    """Weights and results are rounded once each: 0.3 of eps together."""
    q, latent, lengths, table, width = on_gpu(name)
    q, latent = q.to(dtype), latent.to(dtype)
    options = {"width": width, "scale": 0.06, "table": table}
    first, second = (latent_attention(q, latent, lengths, **options, impl="triton") for _ in "ab")
    want, _ = eager_latent_attention(q.double(), latent.double(), lengths, table, width, 0.06)
    assert error(first, want.cpu()) <= 0.4 * torch.finfo(dtype).eps
    assert torch.equal(first, second)


@every_call
def test_latent_attention_in_cuda_graph(name: str) -> None:
    q, latent, lengths, table, width = on_gpu(name)

    def run() -> Tensor:
        return latent_attention(q, latent, lengths, width=width, scale=0.06, table=table)

    run()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    lengths.copy_(lengths.flip(0) // 2 + 1)
    graph.replay()
    assert torch.equal(captured, run())


@pytest.mark.parametrize("name", ["rows", "pages of 64"])
def test_latent_attention_compiles_without_recompiling(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(latent_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for i in range(3):
        q, latent, lengths, table, width = on_gpu(name)
        lengths -= 20 * i * (lengths > 100)
        options = {"width": width, "scale": 0.06, "table": table}
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = compiled(q, latent, lengths, **options)
        assert torch.equal(got, latent_attention(q, latent, lengths, **options))


def layer() -> tuple[MLA, MLA]:
    """On the CPU in float64, on the GPU in bfloat16, of the same weights."""
    made = MLA(256, num_heads=16, q_lora_rank=96).bfloat16()
    return copy.deepcopy(made).double(), made.cuda()


def test_mla_prefill_and_its_gradients_match_float64() -> None:
    wide, here = layer()
    x = torch.randn(2, 333, 256).bfloat16()
    do = torch.randn(2, 333, 256).bfloat16()
    found = []
    for model, device, dtype in ((wide, "cpu", torch.float64), (here, "cuda", torch.bfloat16)):
        leaves = [x.to(device, dtype).requires_grad_(), *model.parameters()]
        y, _ = model(leaves[0])
        found.append([y, *torch.autograd.grad(y, leaves, do.to(device, dtype))])
    for want, got in zip(*found, strict=True):
        assert error(got, want) <= 2e-2


@torch.no_grad()
def test_mla_decoding_absorbed_matches_float64() -> None:
    wide, here = layer()
    x = torch.randn(3, 140, 256).bfloat16()
    want, _ = wide(x.double())
    y, state = here(x[:, :137].cuda(), use_cache=True)
    found = [y]
    for t in range(137, 140):
        y, state = here(x[:, t : t + 1].cuda(), state=state, use_cache=True)
        found.append(y)
    assert error(torch.cat(found, 1), want) <= 2e-2
    assert error(torch.cat(found[1:], 1), want[:, 137:]) <= 2e-2
