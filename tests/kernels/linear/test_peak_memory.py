"""Peaks of memory on sm_90, found out without a GPU: what a call allocates there, and when. Beyond
arguments, results and gradients a call takes 4 GiB or as much as these, whichever is more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.compiler.trace import trace
from slipstream.kernels.linear import op
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.modes import memory
from tests.support import wants
from tests.support.memory import _K, Allocated, allowed, make

pytestmark = wants.compiler
ALONE, FOUR = (8192,), (8192,) * 4
# kind, lengths of sequences, packed where they are several, and heads
CASES: list[tuple[str, tuple[int, ...], int]] = [
    *((kind, ALONE, 32) for kind in ("delta_rule", "gated")),
    *((kind, ALONE, 96) for kind in ("kda", "dplr")),
    *((kind, FOUR, 96) for kind in ("delta_rule", "gated", "kda", "iplr", "dplr")),
    ("gated", (20000, 1, 0, 3000, 9767), 64),
]


def batch(B: int, T: int, H: int, HV: int, device: torch.device) -> LinearInputs:
    """Inputs of the gated delta rule, HV value heads that share H of q and k."""
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    q, k = torch.empty(B, T, H, _K, **like), torch.empty(B, T, H, _K, **like)
    g, beta = torch.empty(B, T, HV, device=device), torch.empty(B, T, HV, device=device)
    return LinearInputs(q, k, torch.empty(B, T, HV, _K, **like), g=g, beta=beta)


def trained(terms: LinearInputs) -> tuple[float, float]:
    """Peak of forward and backward, and bytes of what they are given and leave."""
    given = [x for x in terms if x is not None]
    with Allocated(given) as seen:
        save = op.Extras(save=terms.transition == "delta")
        found = op.forward_impl(*terms, 0.1, 64, "sm90", False, extras=save)
        o, kept = found[0], found[2:]
        do = torch.empty_like(o)
        del found
        options = (0.1, 64, "sm90", terms.g is not None)
        grads = op.backward_impl(*terms, do, None, *options, *kept)
        made = sum(x.nbytes for x in (o, do, *grads))
    return seen.peak - made, made + sum(x.nbytes for x in given)


def alone(terms: LinearInputs) -> tuple[float, float]:
    """Bytes of a forward pass without gradients: its own, and of its results."""
    given = [x for x in terms if x is not None]
    with Allocated(given) as seen:
        o, final = op.forward_impl(*terms, 0.1, 64, "sm90", False)
    return seen.peak - o.nbytes - final.nbytes, o.nbytes + sum(x.nbytes for x in given)


def by_groups(
    of: Callable[[LinearInputs], tuple[float, float]], terms: LinearInputs
) -> tuple[float, float]:
    """Bytes of the first of a call's groups beyond what it is given and leaves, and of what the
    whole call is given and leaves."""
    groups = memory.groups_of(terms, "sm90", of is trained)
    if groups is None:
        return of(terms)
    found: list[tuple[float, float]] = []

    def run(part: LinearInputs) -> tuple[torch.Tensor, ...]:
        found.append(of(part))
        return part.v, part.v.new_empty(part.state_shape, device="meta")

    memory.in_groups(run, terms, terms.dims, groups)
    return found[0][0], sum(whole for _, whole in found)


def share(
    of: Callable[[LinearInputs], tuple[float, float]],
    make: Callable[..., LinearInputs],
    *shape: Any,
) -> float:
    """The memory of a call beyond inputs and results, as a part of the bound."""
    found: list[float] = []

    def call(device: torch.device) -> None:
        beyond, whole = by_groups(of, make(*shape, device))
        found.append(beyond / allowed(whole))

    trace(call, "sm_90", backward=False)
    return found[0]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("of", [trained, alone], ids=["trained", "alone"])
def test_call_memory(
    of: Callable[[LinearInputs], tuple[float, float]], case: tuple[str, tuple[int, ...], int]
) -> None:
    assert share(of, make, *case) <= 1


def packed(B: int, T: int, H: int, HV: int, device: torch.device) -> LinearInputs:
    """The same tokens as packed sequences."""
    cu = torch.empty(B + 1, device=device, dtype=torch.int32)
    return batch(1, B * T, H, HV, device)._replace(cu_seqlens=cu)


# B, T, H, HV
SHARED_HEADS = [
    (B, T, H, HV) for B, T in ((4, 8192), (8, 1024)) for H, HV in ((16, 64), (16, 32), (8, 24))
]
SHARED_HEADS += [(8, 8192, 16, 64)]
LONG_ROWS = [(1, 8192, 16, 64), (1, 8192, 16, 32), (1, 8192, 8, 24), (1, 32768, 8, 24)]
LONG_ROWS += [(1, 32768, 2, 8), (1, 65536, 16, 64), (1, 4096, 16, 64), (1, 1024, 2, 8)]


@pytest.mark.parametrize(
    ("make", "shape"),
    [*((packed, x) for x in SHARED_HEADS), *((batch, x) for x in [*SHARED_HEADS, *LONG_ROWS])],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_call_memory_with_shared_heads(
    make: Callable[..., LinearInputs], shape: tuple[int, int, int, int]
) -> None:
    assert share(trained, make, *shape) <= 1


def test_pairs_take_the_memory_of_scores() -> None:
    """Of a gate a channel backward, by Triton's kernels: each is half of k, which is there once."""

    def call(device: torch.device) -> None:
        terms = batch(1, 8192, 16, 16, device)
        beyond, _ = trained(terms._replace(g=torch.empty_like(terms.v), beta=None))
        assert beyond < 2.5 * terms.k.nbytes, beyond / terms.k.nbytes

    trace(call, "sm_90", backward=False)
