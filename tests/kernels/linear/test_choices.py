"""What plans of the linear family choose by shapes, on both sides of every bound.

Choices change speed or memory, but no number. A digest of many of them is here: whoever changes a
choice on purpose measures it, and writes the new digest.
"""

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any
from zlib import crc32

import pytest
import torch

from slipstream.kernels.linear import segments
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes import memory
from slipstream.kernels.linear.sm90.delta import backend, bwd_schedule
from slipstream.kernels.linear.triton.delta import plan as delta
from slipstream.runtime.consistent import consistent
from tests.support import wants

pytestmark = wants.triton

# tokens, sequences of a batch or of a row, heads of k and v, widths of k and v
GENERAL = product(
    (0, 1000, 1 << 16), ((1, None), (3, None), (1, 5)), ((2, 6), (5, 5)), (32, 96), (64, 128, 320)
)
MANY = product(
    (8192, 1 << 17),
    ((1, None), (2, None), (1, 5), (1, 6)),
    ((1, x) for x in (1, 16, 31, 32, 33, 47, 48, 63, 64, 65, 95, 96, 97)),
    (128,),
    (128,),
)
SMALL = product((1024, 8192), ((1, None),), ((1, x) for x in (15, 16, 17, 97)), (32,), (128,))
WIDE = product((1 << 20,), ((1, 64), (64, None)), ((8, 8), (15, 16)), (64, 128, 256), (128, 264))


@cache
def calls() -> list[LinearInputs]:
    """Of every form."""
    found, make = [], {"device": "meta", "dtype": torch.bfloat16}
    for T, (B, N), (H, HV), K, V in (*GENERAL, *MANY, *SMALL, *WIDE):
        q, v = torch.empty(B, T, H, K, **make), torch.empty(B, T, HV, V, **make)
        gates = torch.empty(B, T, HV, K, device="meta")
        one = gates[..., 0]
        offsets = None if N is None else torch.empty(N + 1, dtype=torch.int32, device="meta")
        plain = LinearInputs(q, q, v, cu_seqlens=offsets)
        found += [plain, plain._replace(g=one), plain._replace(g=gates), plain._replace(gv=v)]
        found += [plain._replace(g=x, beta=one) for x in (one, gates)]
        found += [plain._replace(g=gates, a=gates, b=gates)]
    return found


Choice = Callable[[LinearInputs], Any]
CHOICES: dict[str, tuple[Choice, int]] = {
    "scanned_sm90": (lambda t: segments.scanned_sm90(t, t.v.shape[2]), 2547040388),
    "vector_decay_sm90": (segments.vector_decay_sm90, 3639546543),
    "delta_sm90": (segments.delta_sm90, 2218228175),
    "dplr_sm90": (segments.dplr_sm90, 2199637146),
    "scalar_decay_tokens": (
        lambda t: segments.scalar_decay_tokens(t, t.v.shape[2], 64, 4),
        332518963,
    ),
    "uses_fused_fwd": (segments.uses_fused_fwd, 95624761),
    "fuses": (backend.BACKEND.fuses, 4178834940),
    "uses_fused_bwd": (segments.uses_fused_bwd, 1052479562),
    "num_fused_bwd": (segments.num_fused_bwd, 2219493591),
    "packed_bwd_chunks": (segments.packed_bwd_chunks, 939248380),
    "waits_for_longest": (lambda t: segments.waits_for_longest(t, 2), 2447689492),
    "choose_schedule": (bwd_schedule.choose_schedule, 3358799128),
    "schedule_of_segments": (
        lambda t: [bwd_schedule.schedule_of_segments(t, 64 * n) for n in (7, 16, 22, 130)],
        1301038508,
    ),
    "triton segments": (delta.choose_segments, 103644888),
    "can_pass_states": (delta.can_pass_states, 2436353857),
    "groups": (lambda t: memory.groups_of(t, "triton", True), 343139540),
    "scratch": (
        lambda t: [memory.scratch_bytes(t, *x) for x in product(("sm90", "triton"), (False, True))],
        3444029604,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_by_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_tile", lambda _, *sizes: delta.choose("sm_90", *sizes))
    choice, digest = CHOICES[name]
    made = [text(choice, x) for x in calls()]
    with consistent():
        made += [text(choice, x) for x in calls()]
    assert crc32("".join(made).encode()) == digest


def text(choice: Choice, terms: LinearInputs) -> str:
    try:
        return str(choice(terms))
    except ZeroDivisionError:  # of no sequences, which no plan comes to
        return "-"
