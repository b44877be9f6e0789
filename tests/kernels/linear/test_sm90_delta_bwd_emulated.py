"""The delta rule's backward in one scan as numpy, against the oracle.

As test_sm90_delta_emulated.py has the other kernels.
"""

import pytest
import torch

from tests.support.sm90_delta import CASES, C, Run, fused, inputs, near, wanted


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.sample(which=lambda case, every: every == 2 or case == CASES["packed"])
def test_delta_backward_in_one_scan_matches_reference(case: tuple, every: int) -> None:
    """Through memory that is NaN where nobody has written."""
    terms = inputs((*case[:3], C, *case[4:]))  # with K of C at least, as the kernel has it
    end = int(terms.cu_seqlens[-1]) if terms.cu_seqlens is not None else case[0]
    do, dfinal = torch.randn_like(terms.v), torch.randn(*terms.state_shape, dtype=torch.float64)
    if terms.cu_seqlens is not None:
        do[:, end:] = torch.nan
    run = Run(terms)
    want = wanted(terms, do, dfinal, end)
    _, marks = run.scan(terms.initial_state, None, False, every)
    programs = run.HV * run.slots
    for G, slots in {(run.HV // run.H, 1), (1, min(3, programs)), (1, programs)}:
        dinitial = torch.full_like(dfinal, torch.nan)
        found = fused(run, do, marks, (dfinal, dinitial), G, every, slots)
        near(dinitial, want["initial_state"])
        for name in want:
            if name != "initial_state":
                near(found[name][:, :end], want[name])
        assert found["v"][:, end:].isnan().all()
