"""The backward of attention over the depth for sm_90, on one: beside float64, and its bits."""

import pytest
import torch

from slipstream import ops

SM_90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not SM_90, reason="needs an sm_90 device")


SHAPES = [(9, 3000, 4096), (4, 5000, 2048), (1, 3, 8), (5, 2000, 1000), (2, 7, 4104)]


@pytest.mark.parametrize(
    ("L", "R", "D", "normed"),
    [*((*x, normed) for x in SHAPES for normed in (False, True)), (16, 999, 7168, False)],
)
# with 1, one residual has nearly all of p, and what its score is given cancels
@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_matches_float64(
    L: int, R: int, D: int, normed: bool, scale: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(R, D, device="cuda", dtype=dtype) for _ in range(L)]
    vectors = [torch.randn(D, device="cuda") for _ in range(2 + normed)]
    dy = torch.randn(R, D, device="cuda").to(dtype)
    found = []
    for impl, wide in (("sm90", False), ("sm90", False), ("eager", True)):
        leaves = [x.double() if wide else x.clone() for x in (*rows, *vectors)]
        query, *weights = [x.requires_grad_() for x in leaves][L:]
        y = ops.attnres(query, leaves[:L], *weights, scale=scale, impl=impl)
        found.append(torch.autograd.grad(y, leaves, dy.to(y.dtype)))
    assert L > 1 or not found[0][1].any()  # a softmax of one
    for i, (got, again, want) in enumerate(zip(*found, strict=True)):
        assert torch.equal(got, again), i
        # scores' gradients are differences of products of rows, to float32
        limit, rest = (4e-3, 0.0) if i < L else (1e-3, 2e-7 * D * R**0.5 * scale)
        assert (got.double() - want).norm() <= limit * want.norm() + rest, i
