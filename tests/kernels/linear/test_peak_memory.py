"""Peaks of memory on sm_90, found out without a GPU: what a call allocates there, and when.

Beyond arguments, results and gradients a call whose heads keep the card busy in spans takes a
quarter of them at most.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.compiler.trace import trace
from slipstream.kernels.linear import op, workspace
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.memory import _K, PROMISED, Allocated, make

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")
ALONE, FOUR = (8192,), (8192,) * 4
# kind, lengths of sequences, packed where they are several, and heads
CASES = [
    ("delta_rule", ALONE, 32),
    ("gated", ALONE, 32),
    ("kda", ALONE, 96),
    ("dplr", ALONE, 96),
    ("delta_rule", FOUR, 96),
    ("gated", FOUR, 96),
    ("gated", (20000, 1, 0, 3000, 9767), 64),
    ("kda", FOUR, 96),
    ("iplr", FOUR, 96),
    ("dplr", FOUR, 96),
]


def batch(B: int, T: int, H: int, HV: int, device: torch.device) -> LinearInputs:
    """Of the gated delta rule, HV value heads that share H of q and k."""
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q, k = torch.empty(B, T, H, _K, **like), torch.empty(B, T, H, _K, **like)
    g, beta = torch.empty(B, T, HV, device=device), torch.empty(B, T, HV, device=device)
    return LinearInputs(q, k, torch.empty(B, T, HV, _K, **like), g=g, beta=beta)


def trained(terms: LinearInputs) -> tuple[float, float]:
    """Peak of forward and backward, and bytes of what they are given and leave."""
    given = [x for x in terms if x is not None]
    with Allocated(given) as seen:
        spans = workspace.num_slices(terms, "sm90")
        keep = terms.transition == "delta"
        found = op.forward_impl(*terms, 0.1, 64, "sm90", False, spans, keep=keep)
        o, kept = found[0], found[2:]
        do = torch.empty_like(o)
        del found
        options = (0.1, 64, "sm90", terms.g is not None)
        grads = op._backward(*terms, do, None, *options, *kept)
        made = sum(x.nbytes for x in (o, do, *grads))
    return seen.peak - made, made + sum(x.nbytes for x in given)


def alone(terms: LinearInputs) -> tuple[float, float]:
    """Of a forward pass without gradients."""
    given = [x for x in terms if x is not None]
    with Allocated(given) as seen:
        o, final = op._forward(*terms, 0.1, 64, "sm90", False)
    return seen.peak - o.nbytes - final.nbytes, o.nbytes + sum(x.nbytes for x in given)


def percent(
    of: Callable[[LinearInputs], tuple[float, float]],
    make: Callable[..., LinearInputs],
    *shape: Any,
) -> float:
    found: list[float] = []

    def call(device: torch.device) -> None:
        beyond, whole = of(make(*shape, device))
        found.append(100 * beyond / whole)

    trace(call, "sm_90", backward=False)
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("of", [trained, alone], ids=["trained", "alone"])
def test_a_call_takes_a_quarter_more_at_most(
    of: Callable[[LinearInputs], tuple[float, float]], case: tuple[str, tuple[int, ...], int]
) -> None:
    assert percent(of, make, *case) <= PROMISED


def packed(B: int, T: int, H: int, HV: int, device: torch.device) -> LinearInputs:
    """The same tokens as packed sequences."""
    cu = torch.empty(B + 1, device=device, dtype=torch.int32)
    return batch(1, B * T, H, HV, device)._replace(cu_seqlens=cu)


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((4, 8192, 16, 64), PROMISED),
        ((4, 8192, 16, 32), PROMISED),
        ((4, 8192, 8, 24), PROMISED),
        ((8, 1024, 16, 64), PROMISED),
        ((8, 1024, 16, 32), PROMISED),
        ((8, 1024, 8, 24), 28.0),  # of few short ones a state is as much as their tokens
    ],
    ids=str,
)
def test_packed_sequences_with_shared_heads_take_a_quarter_more_at_most(
    shape: tuple[int, int, int, int], most: float
) -> None:
    assert percent(trained, packed, *shape) <= most


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((4, 8192, 16, 64), PROMISED),
        ((4, 8192, 16, 32), PROMISED),
        ((4, 8192, 8, 24), PROMISED),
        ((8, 1024, 16, 64), PROMISED),
        ((8, 1024, 16, 32), PROMISED),
        ((1, 8192, 16, 64), PROMISED),  # in segments, whose ends are states in float32
        ((1, 8192, 16, 32), PROMISED),
        ((1, 32768, 8, 24), PROMISED),
        ((1, 32768, 2, 8), PROMISED),
        ((1, 8192, 8, 24), 25.6),
        ((1, 4096, 16, 64), PROMISED),
        ((1, 4096, 16, 32), 29.5),
    ],
    ids=str,
)
def test_a_batch_with_shared_heads_takes_little_more(
    shape: tuple[int, int, int, int], most: float
) -> None:
    assert percent(trained, batch, *shape) <= most


@pytest.mark.parametrize("heads", [(16, 64), (16, 32), (8, 24), (2, 8)], ids=str)
@pytest.mark.parametrize(
    "size", [(1, 1024), (1, 2048), (1, 4096), (1, 8192), (4, 8192), (8, 1024)], ids=str
)
def test_shared_heads_take_a_quarter_more_or_else_little(
    size: tuple[int, int], heads: tuple[int, int]
) -> None:
    """Of these sizes. Where heads or tokens are few, states are as much as their tokens."""
    beyond: list[float] = []

    def seen(terms: LinearInputs) -> tuple[float, float]:
        found = trained(terms)
        beyond.append(found[0])
        return found

    B, T = size
    share = percent(seen, packed if B > 1 else batch, B, T, *heads)
    assert share <= PROMISED or beyond[0] <= 84 * 2**20
