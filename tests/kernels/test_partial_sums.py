"""The kernel that adds up partial sums, under Triton's interpreter."""

import torch

from tests.support.interpreted import interpreted


@interpreted
def test_partial_sums_match_torch() -> None:
    from slipstream.kernels.primitives.device import add_partial_sums

    for P, M, D in [(1, 1, 1), (600, 2, 33), (37, 5, 64), (513, 3, 70)]:
        for partial in (torch.randn(P, M, D), torch.randn(M, P, D).transpose(0, 1)):
            outs = [None if i == 1 else torch.empty(D, dtype=torch.bfloat16) for i in range(M)]
            add_partial_sums(partial, outs)
            for i, out in enumerate(outs):
                if out is not None:
                    torch.testing.assert_close(out, partial[:, i].sum(0).bfloat16())
