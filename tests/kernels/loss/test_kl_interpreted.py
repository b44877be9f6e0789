"""The Triton KL divergence under Triton's interpreter: blocks, chunks, masks, classes left out."""

from typing import Any

import torch

from slipstream.ops.distill import linear_kl_div
from tests.support.interpreted import error, interpreted


def check(V: int, temperature: float, masked: bool, reduction: str, dtype: torch.dtype) -> None:
    shapes = {"student": (10, 6), "student_weight": (V, 6), "teacher": (10, 4)}
    shapes |= {"teacher_weight": (V, 4), "student_bias": (V,), "teacher_bias": (V,)}
    given = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    if V > 2:
        given["teacher_bias"][1] = -torch.inf
    mask = torch.rand(10) > 0.3 if masked else None
    found = []
    for impl, wide in (("triton", dtype), ("reference", torch.float64)):
        own: dict[str, Any] = {n: x.to(wide) for n, x in given.items()}
        leaves = [x.requires_grad_() for n, x in own.items() if n.startswith("student")]
        options: dict[str, Any] = {"temperature": temperature, "mask": mask}
        loss = linear_kl_div(**own, **options, reduction=reduction, impl=impl)
        found.append([loss.detach(), *torch.autograd.grad(loss.double().square().sum(), leaves)])
    for x, y in zip(*found, strict=True):
        assert error(x, y) < (2e-5 if dtype == torch.float32 else 2e-2), (V, masked, reduction)


@interpreted
def test_triton_kl_div_matches_reference() -> None:
    from slipstream.kernels.primitives import logit_chunks

    logit_chunks.TILES = ((1 << 62, 16, 4),)
    logit_chunks.CHUNK_BYTES, logit_chunks.ROW_MULTIPLE = 4 * 4 * 64, 4
    cases = [(1, True, "mean"), (16, False, "none"), (37, False, "mean"), (37, True, "none")]
    for V, masked, reduction in cases:
        check(V, 2.0 if masked else 1.0, masked, reduction, torch.float32)
    check(37, 1.0, True, "sum", torch.float16)
