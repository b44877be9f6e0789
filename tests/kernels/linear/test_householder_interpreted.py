"""The copies of tokens to and from their steps, under Triton's interpreter, against torch's."""

import torch
from torch import Tensor

from slipstream.kernels.linear.householder import eager_deinterleave, eager_interleave
from tests.support.interpreted import interpreted

# B, T, H, HV, K, n, dtype
CASES = [
    (1, 1, 1, 1, 1, 1, torch.float32),
    (1, 5, 2, 4, 8, 3, torch.float32),
    (2, 700, 3, 6, 30, 2, torch.float16),
    (2, 9, 4, 4, 256, 4, torch.float32),
]


def check(q: Tensor, g: Tensor, do: Tensor, n: int) -> None:
    from slipstream.kernels.linear.triton import householder

    for given in ((q, g, None), (q, None, None), (q, g, do), (q, None, do)):
        for x, y in zip(
            householder.interleave(*given, n), eager_interleave(*given, n), strict=True
        ):
            assert x is y is None or (x is not None and y is not None and torch.equal(x, y))
    rows = torch.randn(q.shape[0], q.shape[1] * n, *q.shape[2:]).to(q.dtype)
    gates = torch.randn(g.shape[0], g.shape[1] * n, g.shape[2])
    for x in (gates, None):
        for dtype in (g.dtype, q.dtype):
            got, want = ((torch.empty_like(q), torch.zeros_like(g, dtype=dtype)) for _ in "gw")
            householder.deinterleave(rows, x, n, got[0], None if x is None else got[1])
            eager_deinterleave(rows, x, n, want[0], None if x is None else want[1])
            assert all(torch.equal(x, y) for x, y in zip(got, want))


@interpreted
def test_tokens_are_copied_to_and_from_their_steps() -> None:
    for B, T, H, HV, K, n, dtype in CASES:
        q, do = (torch.randn(B, T, *x).to(dtype) for x in ((H, K), (HV, K + 3)))
        check(q, torch.randn(B, T, HV), do, n)
