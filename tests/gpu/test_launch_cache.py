"""A cached launch gives the same bits as Triton's own, whatever came before."""

from typing import Any
from unittest import mock

import pytest
import torch

from slipstream import ops
from slipstream.runtime.launch_cache import CachedKernel, FusedKernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]


def results(T: int, dtype: torch.dtype, shift: int) -> list[torch.Tensor]:
    torch.manual_seed(T)

    def some(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, device="cuda", dtype=dtype)
        room = x.new_empty(x.numel() + shift)[shift:].view(shape)  # may begin anywhere
        return room.copy_(x / 8).requires_grad_()

    q, k, v = (some(1, T, 2, 64) for _ in range(3))
    g, beta = -torch.rand(1, T, 2, device="cuda"), torch.rand(1, T, 2, device="cuda")
    x, weight = some(T, 96), some(96)
    pool = torch.zeros(T, 2, 64, 64, device="cuda")
    with torch.no_grad():
        step: Any = [t.detach().transpose(0, 1) for t in (q, k, v, g, beta)]
        stepped = ops.recurrent_step(*step[:3], state=pool, g=step[3], beta=step[4])
    outs = [
        ops.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0],
        ops.chunk_gla(q, k, v, g[..., None].expand(q.shape).contiguous())[0],
        ops.chunk_retention(q, k, v)[0],
        ops.attention(q, k, v),
        ops.short_convolution(x[None], some(96, 4), activation="silu")[0],
        ops.swiglu(x, x),
        ops.rms_norm(x, weight),
    ]
    wanted = (q, k, v, x, weight)
    loss = torch.stack([o.float().square().sum() for o in outs]).sum()
    grads = torch.autograd.grad(loss, wanted)
    return [stepped, pool, *outs, *grads]


def test_kept_launches_are_tritons() -> None:
    for T, dtype in (
        (1, torch.bfloat16),
        (16, torch.float16),
        (100, torch.bfloat16),
        (128, torch.bfloat16),
    ):
        for shift in (0, 8, 1, 0):
            got = results(T, dtype, shift)
            with mock.patch.object(
                CachedKernel, "__getitem__", lambda kept, grid: FusedKernel(kept.kernel)[grid]
            ):
                want = results(T, dtype, shift)
            for i, (a, b) in enumerate(zip(got, want)):
                assert torch.equal(a, b), (i, T, dtype, shift)
