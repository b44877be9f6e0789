"""The old failures on a device: none of them takes the process down, and the numbers are right."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from slipstream import layers, ops
from slipstream.runtime import token_ids as guard
from slipstream.runtime.token_ids import raise_pending, synchronize
from tests.support.old_failures import WIDTHS, rwkv7_inputs
from tests.support.operators import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    yield
    synchronize()


def test_rwkv7_packed_with_states() -> None:
    given = rwkv7_inputs(4096)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    want = ops.fused_recurrent_rwkv7(**wide, output_final_state=True)
    moved = {name: x.cuda() for name, x in given.items()}
    got = ops.chunk_rwkv7(**moved, output_final_state=True)
    for x, y in zip(got, want):
        assert x is not None and y is not None and relative_error(x.cpu(), y) < 0.006


def test_retention_layer_in_bf16() -> None:
    layer = layers.MultiScaleRetention(128, 2)
    x = torch.randn(2, 96, 128)
    want = layer(x)[0]
    got = layer.cuda().to(torch.bfloat16)(x.cuda().bfloat16())[0]
    assert relative_error(got.cpu(), want) < 0.03


@pytest.mark.parametrize(("K", "V"), WIDTHS)
def test_attention_of_two_widths(K: int, V: int) -> None:
    q, k, v = (torch.randn(2, 300, 4, width) for width in (K, K, V))
    want = ops.attention(q.double(), k.double(), v.double())
    got = ops.attention(*(x.cuda().bfloat16() for x in (q, k, v)))
    assert relative_error(got.cpu(), want) < 0.01


def model_of(vocabulary: int) -> torch.nn.Module:
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    config = SlipstreamConfig(
        vocab_size=vocabulary, hidden_size=64, num_heads=2, mixers=["gated_deltanet", "attention"]
    )
    return SlipstreamForCausalLM(config).cuda()


def test_token_ids_beyond_the_vocabulary() -> None:
    """Three times the vocabulary through RMSNorms: no device-side assert, the device goes on."""
    model = model_of(50)
    ids = torch.randint(0, 50, (2, 40), device="cuda")
    want = model(ids).logits
    ids[1, 17] = 149
    message = r"input_ids: id 149 at position \(1, 17\) .* vocabulary of 50"

    def look() -> None:
        model(ids)  # its norms and mixers ask, too: they may be late enough to know
        synchronize()

    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            look()
        raise_pending()
    y = ops.embedding(ids, model.get_input_embeddings().weight)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=message):
        ops.rms_norm(y.detach(), torch.ones(64, device="cuda"))
    assert y.isfinite().all()
    ids[1, 17] = 0
    assert model(ids).logits.shape == want.shape
    synchronize()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_token_ids_are_looked_at_without_a_sync() -> None:
    weight = torch.randn(50, 64, device="cuda", requires_grad=True)
    ids = torch.randint(0, 50, (2, 40), device="cuda")

    def look() -> torch.Tensor:
        y = ops.embedding(ids, weight)
        ops.cross_entropy(y, ids).backward()
        return y

    look()  # a kernel's first call in a process may compare it with plain torch, and waits for that
    try:
        torch.cuda.set_sync_debug_mode("error")
        y = look()
        raise_pending()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, weight[ids])


@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 9000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_embedding_matches_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for D in (1, 100, 4096):
        weight = torch.randn(1000, D, device="cuda", dtype=dtype, requires_grad=True)
        ids = torch.randint(0, 1000, shape, device="cuda")
        y, want = ops.embedding(ids, weight), torch.nn.functional.embedding(ids, weight)
        assert torch.equal(y, want)
        dy = torch.randn_like(y)
        grads = [torch.autograd.grad(x, weight, dy, retain_graph=True)[0] for x in (y, y, want)]
        assert torch.equal(grads[0], grads[2])


def test_targets_beyond_the_vocabulary() -> None:
    logits = torch.randn(300, 50, device="cuda", requires_grad=True)
    target = torch.randint(0, 50, (300,), device="cuda")
    target[7], target[9], target[100] = -100, 50, -3

    def train() -> None:
        ops.cross_entropy(logits, target).backward()  # whose later launches may find it already
        synchronize()

    with pytest.raises(ValueError, match=r"target: id 50 at position \(9,\) .* vocabulary of 50"):
        train()


def test_token_ids_in_a_graph_and_compiled() -> None:
    weight = torch.randn(50, 64, device="cuda")
    ids = torch.randint(0, 50, (2, 40), device="cuda")
    want = ops.embedding(ids, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.embedding(ids, weight)
    graph.replay()
    synchronize()
    assert torch.equal(y, want)
    ids[0, 3] = 150
    graph.replay()
    with pytest.raises(ValueError, match=r"id 150 at position \(0, 3\)"):
        synchronize()
    compiled = torch.compile(ops.embedding, fullgraph=True)
    compiled(ids, weight)
    with pytest.raises(ValueError, match=r"id 150 at position \(0, 3\)"):
        synchronize()


def test_check_sync_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "SYNC", True)
    with pytest.raises(ValueError, match=r"id 9 at position \(1,\)"):
        ops.embedding(torch.tensor([0, 9], device="cuda"), torch.randn(5, 4, device="cuda"))


def test_process_survives() -> None:
    """And so does one that never looks."""
    code = """
import torch
from slipstream import ops
y = ops.embedding(torch.tensor([1 << 40, -7], device="cuda"), torch.ones(5, 4, device="cuda"))
torch.cuda.synchronize()
assert (y == 1).all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
