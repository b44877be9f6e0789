"""Attention's dropout by the kernels: the weights that plain torch drops, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.op import softmax
from slipstream.ops.attention import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (130, 20), "causal": False, "softcap": 5.0},
    "packed": {"cu_seqlens": (0, 5, 5, 180, 300)},
    "few queries": {"key_lengths": (300,)},
}


def weights(impl: str, device: str) -> Tensor:
    """[T, H, T], of one seed: with v = 1, an output is its weights."""
    T = 128  # as wide as float32 goes
    q = torch.zeros(1, T, 2, 64, device=device)
    v = torch.eye(T, device=device)[None, :, None].expand(1, T, 2, T)
    seed = torch.tensor([1234567890123456789], device=device)
    terms = AttentionInputs(q, q, v, seed=seed)
    return softmax(terms, AttentionOptions(1.0, dropout=0.3), impl)[0][0]


def test_dropout_seed_is_portable() -> None:
    want = weights("eager", "cpu")
    for impl in ("eager", "triton"):
        got = weights(impl, "cuda").cpu()
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_kernels_equal_plain_torch(name: str, D: int) -> None:
    T = 3 if name == "few queries" else 300
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.randn(1, T, 4, D, **make)
    k, v = (torch.randn(1, 300, 2, D, **make) for _ in range(2))
    options = {n: torch.tensor(x, device="cuda") if n in ("cu_seqlens", "key_lengths") else x
               for n, x in OPTIONS[name].items()}  # fmt: skip
    found = []
    for impl in ("triton", "triton", "eager"):
        torch.manual_seed(3)
        o = attention(q, k, v, dropout_p=0.2, impl=impl, **options)
        assert isinstance(o, Tensor)
        found.append([o.detach(), *torch.autograd.grad(o.float().square().sum(), (q, k, v))])
    for got, again, want in zip(*found, strict=True):
        assert torch.equal(got, again)
        assert float((got - want).float().norm() / want.float().norm()) < 2e-2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(5)
        o: Any = attention(q, k, v, dropout_p=0.5) if not checkpointed else checkpoint(
            lambda *x: attention(*x, dropout_p=0.5), q, k, v, use_reentrant=reentrant
        )  # fmt: skip
        torch.rand(7, device="cuda")
        o.square().sum().backward()
        grads.append([x.grad for x in (q, k, v)])
        q.grad = k.grad = v.grad = None
    for got, want in zip(grads[1], grads[0]):
        assert got is not None and want is not None and torch.equal(got, want)


def test_seeds_are_drawn_without_a_sync() -> None:
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))

    def train() -> None:
        o = attention(q, k, v, dropout_p=0.5)
        assert isinstance(o, Tensor)
        o.sum().backward()

    train()
    try:
        torch.cuda.set_sync_debug_mode("error")
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
