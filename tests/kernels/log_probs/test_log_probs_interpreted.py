"""The Triton kernel of log-probabilities and entropies under Triton's interpreter."""

import torch

from slipstream.ops import linear_log_probs
from tests.support.interpreted import error, interpreted


def check(V: int, size: float, biased: bool, dtype: torch.dtype) -> None:
    """size: of the logits; from 50 on one class has nearly all."""
    hidden, weight = torch.randn(10, 6), size * torch.randn(V, 6)
    given = [hidden.to(dtype), weight.to(dtype)]
    if biased:
        bias = torch.randn(V)
        if V > 2:
            bias[1] = -torch.inf
        given.append(bias.to(dtype))
    target = torch.randint(0, V, (10,))
    target[target == 1] = 0
    target[4] = -100
    weights = torch.randn(2, 10).double()
    found = []
    for impl, wide in (("triton", dtype), ("reference", torch.float64)):
        leaves = [x.to(wide, copy=True).requires_grad_() for x in given]
        h, w, *more = leaves
        outs = linear_log_probs(
            h, w, target, *more, temperature=1.5, return_entropy=True, impl=impl
        )
        total = (torch.stack(outs).double() * weights).sum()
        found.append([*(x.detach() for x in outs), *torch.autograd.grad(total, leaves)])
    for x, y in zip(*found, strict=True):
        assert x.isfinite().all()
        assert error(x, y) < (2e-5 if dtype == torch.float32 else 2e-2), (V, size, biased)


@interpreted
def test_triton_log_probs_match_reference() -> None:
    from slipstream.kernels.primitives import logit_chunks

    logit_chunks.TILES = ((1 << 62, 16, 4),)
    logit_chunks.CHUNK_BYTES, logit_chunks.ROW_MULTIPLE = 4 * 4 * 64, 4
    for V, size, biased in [(1, 1.0, True), (16, 1.0, False), (37, 1.0, True), (37, 50.0, False)]:
        check(V, size, biased, torch.float32)
    check(37, 1.0, True, torch.float16)
