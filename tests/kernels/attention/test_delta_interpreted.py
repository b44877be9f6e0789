"""The two numbers of each query for attention's backward, under Triton's interpreter."""

import torch

from tests.support.interpreted import interpreted


def check(B: int, T: int, cu: list[int] | None, has_dlse: bool, BM: int) -> None:
    from slipstream.kernels.attention.triton.sums import launch_delta, launch_delta_of_tiles

    H, D = 3, 20
    o, do = torch.randn(B, T, H, D), torch.randn(B, T, H, D)
    lse, dlse = torch.randn(B, H, T), torch.randn(B, H, T) if has_dlse else None
    lse[:, 1, ::3] = float("-inf")  # queries that see no key
    want = [lse / torch.tensor(2.0).log(), (o * do).sum(-1).mT - (0 if dlse is None else dlse)]
    want[0] = torch.where(want[0].isneginf(), float("inf"), want[0])
    offsets = None if cu is None else torch.tensor(cu, dtype=torch.int32)
    tiles = -(-T // BM) if cu is None else T // BM + len(cu) - 1
    found = [torch.full((B, H, tiles * BM), float("nan")) for _ in range(2)]
    launch_delta_of_tiles(o, do, lse, dlse, *found, offsets, tiles, BM)
    for x, right, none in zip(found, want, (float("inf"), 0.0)):
        expected = torch.full_like(x, none)
        for n, (begin, end) in enumerate(zip(cu or [0], (cu or [0, T])[1:])):
            to = begin // BM * BM + n * BM
            expected[..., to : to + end - begin] = right[..., begin:end]
        torch.testing.assert_close(x, expected)
    found = [torch.full((B, H, -(-T // 4) * 4), float("nan")) for _ in range(2)]
    launch_delta(o, do, lse, dlse, *found)
    for x, right in zip(found, want):
        torch.testing.assert_close(x[..., :T], right)


@interpreted
def test_delta_of_queries_and_of_tiles() -> None:
    check(2, 37, None, True, 16)
    check(1, 50, [0, 5, 5, 31, 50], False, 16)
    check(1, 33, [0, 33], True, 16)
