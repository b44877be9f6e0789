"""Calls whose kernels would leave each other too much memory, in groups of rows or of heads.

Scratch memory of a call may be 4 GiB, or as many bytes as its arguments, results and gradients have
together, whichever is more. A call that would take more is cut into groups of rows of the batch or,
where these are too few, of q's heads with the value heads that read them. Neither rows nor heads
know of each other, so that no sum changes its order.

Scratch memory in bytes a token and value head, at E bytes an element, W the power of two of K, C
tokens a chunk:

    gla, rwkv6          forward 2 W E + C E: q and k with their decays, scores
    delta, one gate     backward V E + C E + 2 K V E / C: w, R, S and dS' of chunks; in one kernel
                        on sm_90 what sm90/delta/bwd_schedule.py says
    kda, dplr           with 1 or 2 for D: forward (2 + D) W E + D C E + 4 V: q, w, b and k, scores
                        and u; backward 2 D C E + V E + K V E / C: scores, x and S; and the larger
                        of D W E + 4 V: b and k, u; and of D W E + V E + K V E / C, with y and dS'.
                        Of few heads forward up to 4 K (K + V) / (8 C) more: two states of segments,
                        of 8 chunks at least

No transition and at most one gate a token need next to nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_exporting

from slipstream.common.checks import plain_int
from slipstream.kernels.linear import inputs, op
from slipstream.kernels.linear.modes.call import Call, Results
from slipstream.kernels.linear.segments import CHUNK, num_fused_bwd, uses_fused_bwd
from slipstream.runtime.autograd import wants_gradient

MIN_ALLOWED_BYTES = 4 << 30
# Programs of a scan, one for 64 columns of V of a head, that keep a GPU busy without segments.
MIN_ACTIVE_PROGRAMS = 128
# The dimensions of o and of the final state, by the letters of inputs.py.
O_DIMS, STATE_DIMS = ("B", "T", "HV", "V"), ("N", "HV", "K", "V")

Dims = Mapping[str, Sequence[str]]
Inputs = TypeVar("Inputs", bound=tuple)


class Groups(NamedTuple):
    """How many groups of rows, and of heads of each of these."""

    rows: int
    heads: int


def groups_of(
    terms: inputs.LinearInputs, impl: str, grads: bool, tokens: int | None = None, beside: int = 0
) -> Groups | None:
    """By shapes alone; None for a call that is not cut. torch.export wants one graph for all sizes,
    so that nothing is cut there.

    Args:
        grads: whether a backward follows.
        tokens: those of a row, where they are not as many as terms say.
        beside: further bytes a token and value head.
    """
    if is_exporting():
        return None
    B, T, HV, V = terms.v.shape
    each = scratch_bytes(terms, impl, grads) + beside
    scratch = B * (tokens or T) * HV * each
    if scratch <= MIN_ALLOWED_BYTES:
        return None
    given = sum(x.numel() * x.element_size() for x in terms if x is not None)
    given = (given + B * T * HV * V * terms.q.element_size()) * (2 if grads else 1)
    count = -(-scratch // max(MIN_ALLOWED_BYTES, given))
    # what rows share has a gradient that is a sum over them
    rows = 1 if terms.cu_seqlens is not None or terms.u is not None else min(count, B)
    heads = min(-(-count // rows), terms.q.shape[2])
    return Groups(rows, heads) if rows > 1 or heads > 1 else None


def scratch_bytes(terms: inputs.LinearInputs, impl: str, grads: bool) -> int:
    """Bytes a token and value head, of forward and, with `grads`, of backward."""
    if not grads:
        return _forward_bytes(terms)
    return max(_forward_bytes(terms), _backward_bytes(terms, impl))


def _forward_bytes(terms: inputs.LinearInputs) -> int:
    K, V, C = plain_int(terms.q.shape[-1]), plain_int(terms.v.shape[-1]), CHUNK
    E, W = terms.q.element_size(), 1 << (K - 1).bit_length()
    if terms.transition == "none":
        if terms.gv is not None:
            return 2 * (1 << (V - 1).bit_length()) * E + C * E
        return 2 * W * E + C * E if terms.decay == "channel" or terms.u is not None else 0
    if terms.transition == "delta" and terms.decay != "channel" and terms.erase is None:
        return C * E
    more = 1 if terms.transition == "delta" else 2
    segments = 0 if _fills_gpu(terms) else 4 * K * (K + V) // (8 * C)
    return (2 + more) * W * E + more * C * E + 4 * V + segments


def _fills_gpu(terms: inputs.LinearInputs) -> bool:
    B, _, HV, V = terms.v.shape
    return 2 * B * HV * -(-V // 64) >= MIN_ACTIVE_PROGRAMS


def _backward_bytes(terms: inputs.LinearInputs, impl: str) -> int:
    if terms.transition == "none":
        return 0
    K, V, C = plain_int(terms.q.shape[-1]), plain_int(terms.v.shape[-1]), CHUNK
    E, states = terms.q.element_size(), K * V * terms.q.element_size() // C
    of_keys = 0
    if terms.q.shape[2] != terms.v.shape[2]:  # their gradients come for each value head
        of_keys = sum(x is not None for x in (terms.q, terms.k, terms.p, terms.a, terms.b)) * K * E
    if terms.transition == "delta" and terms.decay != "channel" and terms.erase is None:
        if impl.startswith("sm90") and (uses_fused_bwd(terms) or num_fused_bwd(terms) > 1):
            return C * E
        return V * E + C * E + 2 * states + of_keys
    more, W = 1 if terms.transition == "delta" else 2, 1 << (K - 1).bit_length()
    scores = 2 * more * C * E + V * E + states
    return scores + more * W * E + max(4 * V, V * E + states) + of_keys


class Memory(NamedTuple):
    """The groups of a call without gradients and with, either of which may have none."""

    alone: Groups | None
    trained: Groups | None

    def into(self, call: Call) -> Call:
        groups = self.trained if wants_gradient(*call.terms) else self.alone
        return call if groups is None else call._replace(run=partial(_run, groups=groups))

    def out(self, call: Call, o: Tensor, state: Tensor | None) -> Results:
        return o, state


def _run(call: Call, groups: Groups) -> Results:
    run: Any = lambda terms: op.linear(terms, call.how)  # noqa: E731
    o, state = in_groups(run, call.terms, call.terms.dims, groups)
    return o, state


def in_groups(
    run: Callable[[Inputs], tuple[Tensor, ...]],
    given: Inputs,
    dims: Dims,
    groups: Groups,
    results: Sequence[Sequence[str]] = (O_DIMS, STATE_DIMS),
) -> tuple[Tensor, ...]:
    """The results of run(given), by calls of it with groups of rows and heads.

    Args:
        given: a NamedTuple of tensors; those that dims do not name go to all calls.
        results: the dimensions of each result.
    """
    letters = ("B", "N") if groups.rows > 1 else ("H", "HV")
    count = groups.rows if groups.rows > 1 else groups.heads
    if groups.rows > 1 and groups.heads > 1:
        inner = groups._replace(rows=1)
        call = partial(in_groups, run, dims=dims, groups=inner, results=results)
    else:
        call = run
    made = zip(*(call(group) for group in _cut(given, dims, letters, count)))
    axes = (_axis(x, letters) for x in results)
    return tuple(torch.cat(group, axis) for group, axis in zip(made, axes) if axis is not None)


def _axis(dims: Sequence[str], letters: Sequence[str]) -> int | None:
    return next((i for i, letter in enumerate(dims) if letter in letters), None)


def _cut(given: Any, dims: Dims, letters: Sequence[str], count: int) -> Iterator[Any]:
    """`given` in as many groups, or fewer of equal size: views of those tensors that have a
    dimension of these letters."""
    axes = {name: _axis(x, letters) for name, x in dims.items()}
    cut = {
        n: x
        for n, axis in axes.items()
        if axis is not None and (x := getattr(given, n)) is not None
    }
    sizes = {n: x.shape[axes[n]] for n, x in cut.items()}
    units = min(sizes.values())
    each = -(-units // count)
    pieces = {n: x.split(each * (sizes[n] // units), axes[n]) for n, x in cut.items()}
    for i in range(-(-units // each)):
        yield given._replace(**{n: x[i] for n, x in pieces.items()})
