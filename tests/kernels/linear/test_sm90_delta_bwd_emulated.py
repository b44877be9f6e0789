"""The delta rule's backward in one walk as numpy, against the oracle.

As test_sm90_delta_emulated.py has the other kernels.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import threads
from tests.kernels.linear.test_sm90_delta_emulated import (
    CASES,
    C,
    Descriptor,
    Pointer,
    Run,
    inputs,
    kernels,
    near,
)


def fused(
    run: Run, do: Tensor, marks: Tensor, ends: tuple, G: int, every: int, slots: int
) -> dict[str, Tensor]:
    """Gradients of q, k, v, beta and g. ends: s_in and s_out; slots: programs at a time."""
    t, (HV, V), (H, K) = run.terms, (run.HV, run.V), (run.H, run.K)
    heads, w, programs = HV // G, run.empty(*run.terms.v.shape), run.HV * run.slots
    made = {n: run.empty(run.B, run.T, heads, K) for n in "qk"}
    sums = {n: run.empty(run.B, run.T, HV) for n in ("beta", "g")}
    states = run.empty(slots * max(every - 2, 1), V, K)
    given = [Descriptor(x, H * K, C, K) for x in (t.q.clone(), t.k)]
    given += [Descriptor(x, HV * V, C, V) for x in (t.v, do)]
    given += [Descriptor(run.r, HV * C, C, C), Descriptor(w, HV * V, C, V)]
    given += [Descriptor(x, K, V, K) for x in (states, marks)]
    given += [Descriptor(x, heads * K, C, K) for x in made.values()]
    pointers = [Pointer(x) for x in (*made.values(), w, run.empty(slots, V, K))]
    pointers += [Pointer(x) for x in (run.rows, *sums.values())]
    pointers += [None if x is None else Pointer(x) for x in ends]
    flags = {name: run.flags[name] for name in ("K", "V", "C", "HAS_GATE", "PACKED", "ST", "SPLIT")}
    flags |= {"HAS_S_IN": ends[0] is not None, "HAS_S_OUT": ends[1] is not None}
    counts = torch.zeros(slots + run.chunks * heads, dtype=torch.int32)
    cu, *sizes = run.sizes[:6]
    args = (*given, *pointers, cu, Pointer(counts), *sizes, G, run.T, every, slots)
    # with turns a program may wait for one that has no slot, if there are so few
    launch = threads.launch if slots == 1 or G > 1 else threads.launch_together
    launch(
        kernels().fused, programs, args, **flags, BK=K // 2, WARPS=4, REGISTERS=0, FEW=0,
        SHARED=G > 1,
    )  # fmt: skip
    assert not counts[:slots].any()
    return {n: x.view(run.B, run.T, H, -1, K).sum(3) for n, x in made.items()} | sums | {"v": w}


def wanted(terms: LinearInputs, do: Tensor, dfinal: Tensor, end: int) -> dict[str, Tensor]:
    live: dict[str, Any] = {
        name: x[:, :end].clone().requires_grad_() if name in ("q", "k", "v", "g", "beta") else x
        for name, x in terms._asdict().items()
        if x is not None
    }
    start = torch.zeros_like(dfinal) if terms.initial_state is None else terms.initial_state
    live["initial_state"] = start.clone().requires_grad_()
    o, final = linear_reference(LinearInputs(**live), 0.3)
    loss = (o * do[:, :end]).sum() + (final * dfinal).sum()
    names = [n for n in ("v", "initial_state", "q", "k", "beta", "g") if n in live]
    return dict(zip(names, torch.autograd.grad(loss, [live[n] for n in names]), strict=True))


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_delta_backward_in_one_walk_matches_reference(case: tuple, every: int) -> None:
    """Through memory that is NaN where nobody has written."""
    terms = inputs((*case[:3], C, *case[4:]))  # with K of C at least, as the kernel has it
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    if terms.cu_seqlens is not None:
        do[:, end:] = torch.nan
    run = Run(terms)
    want = wanted(terms, do, dfinal, end)
    _, marks = run.walk(terms.initial_state, None, False, every)
    programs = run.HV * run.slots
    for G, slots in {(run.HV // run.H, 1), (1, min(3, programs)), (1, programs)}:
        dinitial = torch.full_like(dfinal, torch.nan)
        found = fused(run, do, marks, (dfinal, dinitial), G, every, slots)
        near(dinitial, want["initial_state"])
        for name in want:
            if name != "initial_state":
                near(found[name][:, :end], want[name])
        assert found["v"][:, end:].isnan().all()
