"""The schedule of the delta rule's backward on sm_90 (sm90/delta/bwd_schedule.py)."""

from itertools import pairwise

import pytest
import torch

from slipstream.kernels.linear.inputs import LinearInputs
from tests.support import wants

pytestmark = wants.compiler
C, K = 64, 128
# B, T, H, HV, and how many packed sequences
SHAPES = [
    (1, 8192, 16, 64, 0),
    (1, 32768, 2, 8, 0),
    (3, 4097, 4, 20, 0),
    (1, 3001, 64, 64, 0),
    (2, 5000, 16, 96, 0),
    (1, 9000, 2, 32, 3),
    (1, 20001, 8, 8, 5),
    (1, 8192, 8, 24, 8),
    (1, 30000, 16, 64, 7),
    (1, 32768, 8, 8, 29),
]


def terms(shape: tuple[int, int, int, int, int], V: int = 128) -> LinearInputs:
    B, T, H, HV, N = shape
    make = {"dtype": torch.bfloat16, "device": "meta"}
    q, v = torch.empty(B, T, H, K, **make), torch.empty(B, T, HV, V, **make)
    beta = torch.empty(B, T, HV, device="meta")
    cu = torch.empty(N + 1, dtype=torch.int32, device="meta") if N else None
    return LinearInputs(q, q, v, g=beta, beta=beta, cu_seqlens=cu)


def packings(T: int, N: int) -> list[list[int]]:
    """Offsets: even ones, all in one sequence, and at random."""
    drawn = torch.randint(T + 1, (20, N - 1)).sort().values.tolist()
    even = [n * T // N for n in range(N + 1)]
    return [even, [0] * N + [T], [0] + [T] * N, *([0, *x, T] for x in drawn)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_schedule_has_room_for_segments(shape: tuple[int, int, int, int, int]) -> None:
    from slipstream.kernels.linear.sm90.delta.bwd_schedule import choose_schedule

    B, T, _, HV, N = shape
    given = terms(shape)
    cut = choose_schedule(given)
    assert cut is not None
    part, (segment, count, *_) = cut.interval * C, cut.segments or (T, 0)
    assert count == 0 or segment % part == 0
    assert cut.programs(given) == HV * (count or given.sequences)
    if not N:
        assert cut.checkpoints == B * -(-T // part)
        assert count in (0, B * -(-T // segment))
    for offsets in packings(T, N) if N else []:
        for tokens, room in ((part, cut.checkpoints), (segment, count))[: 1 + bool(count)]:
            taken = [
                a // tokens + n + i
                for n, (a, b) in enumerate(pairwise(offsets))
                for i in range(-(-(b - a) // tokens))
            ]
            assert len(set(taken)) == len(taken)
            assert max(taken) < room


def test_segments_follow_multiprocessors() -> None:
    """And no longer than that for the sake of parts."""
    from slipstream.kernels.linear import segments
    from slipstream.kernels.linear.sm90.delta import bwd_schedule

    for T in range(9000, 40000, 1111):
        for HV in (8, 24, 32, 40, 64):
            given = terms((1, T, 8, HV, 0))
            cut = bwd_schedule.choose_schedule(given)
            assert cut is not None and cut.segments is not None
            assert cut.programs(given) <= segments.NUM_SMS
            wanted = -(-T // C) / segments.num_fused_bwd(given)
            assert cut.segments.tokens // C < -(-wanted // 1) + cut.interval


def test_long_row_of_documents_is_cut() -> None:
    from slipstream.kernels.linear.sm90.delta.bwd_schedule import choose_schedule

    tokens = []
    for T, heads, N in ((32768, 8, 29), (32768, 32, 29), (8192, 32, 8), (8192, 16, 32)):
        cut = choose_schedule(terms((1, T, heads, heads, N)))
        assert cut is not None
        tokens.append(cut.segments and cut.segments.tokens)
    assert tokens == [16 * C, None, None, None]
