"""A call with impl="eager" computes all of it in plain torch, what comes before the recurrence too:
in float64 on a GPU no kernel takes that either, and SLIPSTREAM_FALLBACK=error would refuse it."""

import sys
from typing import Any

import pytest
import torch

from slipstream.runtime import dispatch
from slipstream.tools.catalog import Sample
from tests.support.operators import LINEAR, Size

HEADS = 2
SIZE = Size(B=1, T=5, H=1, HV=HEADS, K=4, V=4, M=3)
NORMS = ("use_qk_l2norm_in_kernel", "use_q_l2norm", "use_k_l2norm")


@pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)
def test_call_asked_for_plain_torch_leaves_no_choice(op: Sample) -> None:
    args = dict(op.inputs(SIZE))
    args |= {x: True for x in NORMS if x in op.takes}
    if "use_gate_in_kernel" in op.takes:
        args |= {"use_gate_in_kernel": True, "A_log": torch.zeros(HEADS)}
    chosen = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is dispatch.choose.__code__:
            chosen.append((frame.f_locals["family"], frame.f_locals["impl"]))

    sys.setprofile(look)
    try:
        op(args, impl="eager")
    finally:
        sys.setprofile(None)
    free = [family for family, impl in chosen if impl is None]
    assert not free, f"{op.name} leaves a choice to {free}"
