"""The forward for sm_90 by numpy, beside what each query sees in float64."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import reference
from slipstream.kernels.selected_attention.inputs import SelectedInputs, SelectedOptions, visible
from tests.gluon_emulator.threads import Descriptor, kernel, launch
from tests.support.sm90_attention import at, desc, ptr

KERNEL = "slipstream.kernels.selected_attention.sm90_kernels:selected_fwd_sm90_kernel"


class Case(NamedTuple):
    B: int = 1
    T: int = 21
    S: int = 150
    H: int = 32
    HKV: int = 2
    G: int = 2
    D: int = 64
    block: int = 64
    BN: int = 64
    entries: int = 3
    causal: bool = True
    sinks: bool = False


CASES = [
    Case(sinks=True),
    Case(B=2, S=128, HKV=4, H=32, G=1, causal=False),
    Case(T=9, H=32, HKV=1, G=2, D=128, block=128),
    Case(T=33, S=300, H=16, HKV=1, G=1, block=128, BN=128, entries=2),
    Case(T=5, H=64, HKV=1, G=1, entries=1),
    Case(T=3, H=8, HKV=1, G=1, entries=9),
]


def merged(selected: Tensor, QT: int, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of QT queries as selected_merge_kernel leaves them; unused places are poisoned."""
    B, T, G, entries = selected.shape
    rows, W = -(-T // QT), QT * entries
    lists = torch.full((B * rows, G, W), 1 << 20, dtype=torch.int32)
    bits = torch.full((B * rows, G, W), -1, dtype=torch.int32)
    counts = torch.zeros(B * rows, G, dtype=torch.int32)
    for b in range(B):
        for row in range(rows):
            for g in range(G):
                found: dict[int, int] = {}
                for t in range(row * QT, min(row * QT + QT, T)):
                    for x in selected[b, t, g].tolist():
                        seen = not case.causal or x * case.block <= t + case.S - T
                        if x >= 0 and seen:
                            found[x] = found.get(x, 0) | 1 << (t - row * QT)
                at_row = b * rows + row, g
                counts[at_row] = len(found)
                for i, x in enumerate(sorted(found)):
                    lists[(*at_row, i)], bits[(*at_row, i)] = x, found[x]
    return lists, bits, counts


def run(case: Case, inputs: SelectedInputs, programs: int) -> tuple[Tensor, Tensor]:
    (B, T, H, D), G = inputs.q.shape, inputs.selected.shape[2]
    heads = max(case.HKV, G)
    R = H // heads
    QT = 64 // R
    lists, bits, counts = merged(inputs.selected, 2 * QT, case)
    rows = counts.shape[0] // B
    o = torch.full((B, T, H, D), torch.nan, dtype=torch.float64)
    lse = torch.full((B, H, T), torch.nan, dtype=torch.float64)
    q, k, v = Descriptor(inputs.q.numpy().reshape(-1, D), (R, 64)), inputs.k, inputs.v
    given = (q, desc(k, case.BN, 64), desc(v, case.BN), *map(ptr, (o, lse, inputs.sinks)))
    sizes = (T, case.S, H, heads, heads // case.HKV, G, lists.shape[2], rows, rows * heads * B)
    factor = D**-0.5 / 0.6931471805599453
    args = (*given, *map(ptr, (lists, bits, counts)), factor, *sizes, *at(k), *at(v))
    tile = {"NC": 2, "QT": QT, "R": R, "BN": case.BN, "D": D, "DV": D, "ST": 2}
    flags = {"BLOCK": case.block, "CAUSAL": case.causal, "HAS_SINKS": case.sinks}
    launch(kernel(KERNEL), programs, args, **tile, **flags, CONSUMER=0, PRODUCER=0)
    return o, lse


@pytest.mark.parametrize("case", CASES, ids=lambda x: f"{x.H}x{x.D} of {x.block}")
def test_forward_matches_reference(case: Case) -> None:
    torch.manual_seed(case.T)
    B, T, S, D = case.B, case.T, case.S, case.D
    q = torch.randn(B, T, case.H, D, dtype=torch.float64)
    k, v = (torch.randn(B, S, case.HKV, D, dtype=torch.float64) for _ in range(2))
    blocks = -(-S // case.block)
    lists = torch.randint(-1, blocks, (B, T, case.G, case.entries), dtype=torch.int32)
    lists[:, 1] = -1
    sinks = torch.randn(case.H, dtype=torch.float64) if case.sinks else None
    inputs = SelectedInputs(q, k, v, lists, sinks)
    how = SelectedOptions(D**-0.5, -1, 0, case.causal, case.block, False)
    seen = visible(reference.placed_keys(inputs.dense)[3], lists, S, how)
    plain = reference.AttentionOptions(D**-0.5)
    right = reference.softmax_reference(inputs.dense, plain, seen.transpose(1, 2))
    for programs in (1, 3):
        for got, want in zip(run(case, inputs, programs), right, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
