"""The memory that a rank of context parallelism holds on sm_90 in a forward pass without gradients,
beside one GPU with all tokens; found out without a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.compiler.trace import trace
from slipstream.kernels.linear import context, op
from slipstream.kernels.linear.context_terms import Call
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from slipstream.runtime.context_parallel import Share
from tests.support.memory import Allocated

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
RANKS, TOKENS = 2, 65536


class AnyMessages(Share):
    """Ranks of which no other is there."""

    def send(self, x: Tensor, to: list[int], sizes: dict[int, int]) -> dict[int, Tensor]:
        return {r: x.new_empty(n) for r, n in sizes.items()}


def inputs(kind: str, T: int, H: int, device: torch.device) -> LinearInputs:
    """As bench/context_parallel.py has them."""
    K = 64 if kind == "rwkv7" else 128
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    names = "qkvgab" if kind == "rwkv7" else "qkvg"
    given: dict[str, Tensor] = {n: torch.empty(1, T, H, K, **like) for n in names}
    if kind == "kda":
        given["beta"] = torch.empty(1, T, H, device=device)
    return LinearInputs(**given)


@pytest.mark.parametrize(
    ("kind", "H", "limit"),
    [("kda", 16, 0.58), ("kda", 32, 0.52), ("rwkv7", 32, 0.52), ("gla", 16, 0.52)],
)
def test_forward_memory_of_a_rank_is_about_half(kind: str, H: int, limit: float) -> None:
    """kda's 16 heads are two groups, since three take too long."""
    held: list[float] = []

    def call(device: torch.device) -> None:
        for rank in (None, *range(RANKS)):
            terms = inputs(kind, TOKENS * (RANKS if rank is None else 1), H, device)
            given = [x for x in terms if x is not None]
            with Allocated(given) as seen:
                if rank is None:
                    found = op.forward_impl(*terms, 0.1, 64, "sm90", False)
                else:
                    share = AnyMessages(rank, (TOKENS,) * RANKS, None)
                    options = Call(ForwardCall(0.1, 64, "sm90"), lambda _: "sm90", False)
                    found = context._forward(*terms, share, options, False)
                del found
            held.append(seen.peak + sum(x.nbytes for x in given))

    trace(call, "sm_90", backward=False)
    one, *ranks = held
    assert max(ranks) <= limit * one, [x / one for x in ranks]
