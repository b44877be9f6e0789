"""KDA's forward in one kernel (kernels/linear/sm90/dplr/fused_fwd.py) for the emulator."""

import functools
import importlib
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import rounding, threads
from tests.support.sm90_dplr import PARTS, C

SCALE = 0.3


def _tokens(g: Tensor, some: list[int], gate: float) -> Tensor:
    g[:, some] = gate
    return g


# of numbers from 0 to 1
GATES: dict[str, Any] = {
    "to -0.1": lambda x: -0.1 * x,
    "to -50": lambda x: -50 * x,
    "a token of -200": lambda x: _tokens(0 * x, [37], -200.0),
    "-200 and 0": lambda x: torch.where(x < 0.5, -200.0, 0.0),
    "resets": lambda x: _tokens(-0.1 * x, [70, 71, 127], -torch.inf),
    **{str(n): lambda x, n=n: 0 * x + n for n in (-1, -5, -7, -20, -torch.inf)},
}


@functools.cache
def kernel(rounds: bool) -> Any:
    """rounds: for rounding.rounded, else in float64."""
    with emulator.emulated():
        language = sys.modules["slipstream.kernels.primitives.gluon_compat"].gl
        vars(language).update(
            associative_scan=lambda x, axis, add: threads.tensor(np.cumsum(x, axis)),
            min=lambda x, axis: threads.tensor(np.fmin.reduce(x, axis)),
        )
        if rounds:
            vars(language).update(rounding.language())
        return importlib.import_module(PARTS + "dplr.fused_fwd").kda_fused_fwd_sm90_kernel


def run(terms: LinearInputs, rounds: bool = False) -> tuple[Tensor, Tensor]:
    """o and the final states, in memory that was NaN."""
    T, HV, V = terms.v.shape[1:]
    H, K = terms.q.shape[2:]
    o = torch.full_like(terms.v, torch.nan)
    final = torch.full(terms.state_shape, torch.nan, dtype=torch.float64)
    tiles = (terms.q, terms.k, terms.v, terms.g, o)
    tiles = [emulator.Descriptor(x, x.shape[2] * x.shape[3], C, 64) for x in tiles if x is not None]
    strong = torch.full((terms.sequences * HV, 2), -1, dtype=torch.int32)
    given = (o, terms.beta, strong, terms.initial_state, final, terms.cu_seqlens)
    pointers = [None if x is None else emulator.Pointer(x.contiguous()) for x in given]
    flags: dict[str, Any] = {"K": K, "V": V, "C": C, "PACKED": terms.cu_seqlens is not None}
    flags |= {"HAS_S_IN": terms.initial_state is not None, "HAS_S_OUT": True}
    args = (*tiles, *pointers, SCALE, T, terms.sequences, HV, H)
    # of heads with strong gates, which the second repeats, the first's numbers are not finite
    with mock.patch.object(emulator, "INPUTS_HAVE_NAN", rounds or emulator.INPUTS_HAVE_NAN):
        threads.launch(kernel(rounds), HV * terms.sequences, args, **flags, STRONG=False)
    threads.launch(kernel(rounds), HV * terms.sequences, args, **flags, STRONG=True)
    return o, final


def as_given(terms: LinearInputs) -> LinearInputs:
    """Numbers that bfloat16 and, of gates and beta, float32 have."""
    exact = terms.of_tokens(lambda x: x.bfloat16().double())
    g, beta = (None if x is None else x.float().double() for x in (terms.g, terms.beta))
    return exact._replace(g=g, beta=beta)
