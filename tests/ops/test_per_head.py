"""Decays of heads are made once, and anew where somebody else would own them."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from slipstream import ops
from slipstream.ops._preprocess import per_head

MADE: list[float] = []


def doubled(h: Tensor, by: float) -> Tensor:
    MADE.append(by)
    return h * by


def test_per_head_formula_is_cached() -> None:
    v = torch.zeros(1, 3, 5, 4)
    MADE.clear()
    first, again = per_head(v, doubled, 2.0), per_head(v.clone(), doubled, 2.0)
    assert first is again and first.dtype == torch.float32 and first.tolist() == [0, 2, 4, 6, 8]
    assert per_head(v.double(), doubled, 2.0).dtype == torch.float64
    assert per_head(v, doubled, 3.0).tolist() == [0, 3, 6, 9, 12]
    assert per_head(v[:, :, :2], doubled, 2.0).tolist() == [0, 2]
    assert MADE == [2.0, 2.0, 3.0, 2.0]


def test_per_head_cache_skips_fake_tensors() -> None:
    MADE.clear()
    with FakeTensorMode():
        assert isinstance(per_head(torch.zeros(1, 3, 7, 4), doubled, 2.0), FakeTensor)
    real = per_head(torch.zeros(1, 3, 7, 4), doubled, 2.0)
    assert not isinstance(real, FakeTensor) and MADE == [2.0, 2.0]


def test_per_head_made_in_inference_mode() -> None:
    given = [torch.randn(1, 3, 11, 4) for _ in range(3)]
    with torch.inference_mode():
        ops.chunk_lightning_attn(*given, 1, 4)
    live = [x.requires_grad_() for x in given]
    ops.chunk_lightning_attn(*live, 1, 4)[0].sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in live)
