"""Under context parallelism with fixed segments all ranks run the same kernels, however few tokens
some of them have; found out without a GPU."""

import pytest
import torch

from slipstream.compiler.trace import trace
from slipstream.kernels.linear.dispatch import Asked, choose_plan
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes.call import LinearOptions
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.memory import make

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
TOKENS = (1, 40, 100, 144, 256, 1000, 20000)


def gla(T: int, H: int, device: torch.device) -> LinearInputs:
    wide = [torch.empty(1, T, H, 128, device=device, dtype=torch.bfloat16) for _ in "qkvg"]
    return LinearInputs(*wide)


@pytest.mark.parametrize("H", [2, 16, 64])
@pytest.mark.parametrize("kind", ["gla", "delta_rule", "gated", "kda", "dplr", "iplr"])
def test_kernels_do_not_depend_on_a_rank_s_tokens(kind: str, H: int) -> None:
    chosen = {}

    def call(device: torch.device) -> None:
        for T in TOKENS:
            terms = gla(T, H, device) if kind == "gla" else make(kind, (T,), H, device)
            asked = (Asked(context=(fixed, None)) for fixed in (True, False))
            fixed, free = (choose_plan(terms, LinearOptions(), False, x)[0] for x in asked)
            chosen[T] = fixed.impls, free.impls

    trace(call, "sm_90", backward=False)
    fixed, free = (set(x) for x in zip(*chosen.values()))
    assert len(fixed) == 1 and next(iter(fixed)).startswith("sm90")
    # the question is not idle: without fixed segments a few heads of few tokens are Triton's
    assert len(free) == (2 if kind == "gla" and H < 64 else 1)
