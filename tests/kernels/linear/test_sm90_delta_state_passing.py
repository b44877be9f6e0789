"""The state that each segment meets (sm90/delta/state_passing.py), as its docstring says."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.support.interpreted import interpreted

K, V, HV, SEGMENT = 16, 32, 2, 64
# offsets of packed sequences, or rows of a batch and their tokens
CASES = [(0, 5, 5, 330, 394), (70, 70, 320), (0, 64, 128), ("batch", 2, 200)]


def sequences(case: tuple) -> list[tuple[int, int]]:
    """The first slot and the segments of each."""
    if case[0] == "batch":
        each = -(-case[2] // SEGMENT)
        return [(n * each, each) for n in range(case[1])]
    return [(a // SEGMENT + n, -(-(b - a) // SEGMENT)) for n, (a, b) in enumerate(pairwise(case))]


def wanted(
    case: tuple, made: Tensor, m: Tensor, far: Tensor, s_in: Tensor, back: bool
) -> dict[int, Tensor]:
    """By slots that have a segment."""
    met: dict[int, Tensor] = {}
    for n, (first, count) in enumerate(sequences(case)):
        order = list(range(first, first + count))[:: -1 if back else 1]
        state = s_in[n]
        for slot in order:
            met[slot] = state
            M = m[slot, ..., V:].mT if back else m[slot, ..., V:]
            led = M @ state + made[slot, ..., :V]
            state = torch.where(far[slot, :, None, None] > 0, made[slot, ..., :V], led)
    return met


def behind(x: Tensor, before: float) -> Tensor:
    """x, with two rows of that before it in memory."""
    return torch.cat([torch.full_like(x[:2], before), x])[2:]


def check(case: tuple, back: bool, decays: bool) -> None:
    from slipstream.kernels.linear.sm90.delta import state_passing

    launch: Any = state_passing.delta_state_passing_sm90_kernel
    packed, N = case[0] != "batch", len(sequences(case))
    T = case[-1]
    slots = T // SEGMENT + N if packed else N * -(-T // SEGMENT)
    # what is before the first slot is NaN, and a state far enough is there to end at
    m = behind(torch.randn(slots, HV, K, V + K) / 4, torch.nan)
    made = behind(torch.randn(slots, HV, K, V), torch.nan) if back else m
    alone = back and not decays  # M with nothing beside it
    beside = behind(m[..., V:].contiguous(), torch.nan) if alone else m
    far = behind((torch.rand(slots, HV) < 0.3 * decays).int(), 1)
    for first, count in sequences(case):
        if count:
            far[[first, first + count - 1]] = 1
    s_in, met = torch.randn(N, HV, K, V), torch.full((slots, HV, K, V), torch.nan)
    cu = torch.tensor(case, dtype=torch.int32) if packed else None
    launch[(V // 16 * HV * slots,)](
        made, beside[..., -K:], far, s_in, met, None, cu, T, N, HV, SEGMENT,
        K=K, V=V, BV=16, E_WIDTH=made.stride(2), M_WIDTH=beside.stride(2), BACK=back,
        HAS_S_IN=True, HAS_S_OUT=False, PACKED=packed,
    )  # fmt: skip
    for slot, state in wanted(case, made, m, far, s_in, back).items():
        torch.testing.assert_close(met[slot], state, rtol=1e-4, atol=1e-4)
    assert not met[: sequences(case)[0][0]].isnan().any()  # nobody's, before the first sequence


def check_every(case: tuple, back: bool, ends: bool, starts: bool) -> None:
    """E and M of every segment, and the states that sequences end with."""
    from slipstream.kernels.linear.sm90.delta import state_passing

    launch: Any = state_passing.delta_state_passing_sm90_kernel
    packed, N, T = case[0] != "batch", len(sequences(case)), case[-1]
    slots = T // SEGMENT + N if packed else N * -(-T // SEGMENT)
    made = torch.randn(slots, HV, K, V + K) / 4
    far = (torch.rand(slots, HV) < 0.3).int()
    s_in, s_out = torch.randn(N, HV, K, V) * starts, torch.zeros(N, HV, K, V)
    met, cu = torch.zeros(slots, HV, K, V), None
    E = made[..., :V].contiguous() if back else made
    if packed:
        cu = torch.tensor(case, dtype=torch.int32)
    unwritten = made.clone()
    unwritten[..., V:][far.bool()] = torch.nan
    if not starts:
        for first, count in sequences(case):
            if count:  # nor is it read where nothing comes in
                unwritten[first + (count - 1) * back, ..., V:] = torch.nan
    given = s_in if starts else None, met, s_out if ends else None, cu
    launch[(V // 16 * HV * (N + slots if ends else slots),)](
        E, unwritten[..., V:], far, *given, T, N, HV, SEGMENT,
        K=K, V=V, BV=16, E_WIDTH=E.stride(2), M_WIDTH=V + K, BACK=back, HAS_S_IN=starts,
        HAS_S_OUT=ends, PACKED=packed,
    )  # fmt: skip
    found = wanted(case, made, made, far, s_in, back)
    for slot, state in found.items():
        torch.testing.assert_close(met[slot], state, rtol=1e-4, atol=1e-4)
    for n, (first, count) in enumerate(sequences(case) if ends else []):
        state = s_in[n]
        if count:
            last = first if back else first + count - 1
            M = made[last, ..., V:].mT if back else made[last, ..., V:]
            led = M @ found[last] + made[last, ..., :V]
            state = torch.where(far[last, :, None, None] > 0, made[last, ..., :V], led)
        torch.testing.assert_close(s_out[n], state, rtol=1e-4, atol=1e-4)


@interpreted
def test_segments_receive_states_interpreted() -> None:
    from slipstream.kernels.linear.sm90.delta import state_passing

    product: Any = state_passing.tile_product
    # pairs of bf16 are not what the interpreter multiplies
    state_passing.tile_product = lambda a, b, inner: product(a, b, "ieee")
    for case in CASES:
        for back in (False, True):
            for yes in (False, True):
                check_every(case, back, yes, starts=True)
                check_every(case, back, yes, starts=False)
                check(case, back, yes)
