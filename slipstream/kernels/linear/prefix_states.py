"""States that an operator leaves on its way, for requests that share a prefix to go on from.

The kernels that carry a state from chunk to chunk write it where it goes, in float32 or the pool's
dtype, while they go on. Where there are none a pass is cut into calls.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.runtime.autograd import needs_autograd
from slipstream.runtime.consistent import BLOCK


class PrefixStates(NamedTuple):
    """The states to leave.

    Attributes:
        pool: memory for states [rows, HV, V, K], contiguous, of any float dtype. Written in place.
        rows: int32 [N, ceil(T / 64)]: the row for the state after the first 64 (j + 1) tokens of
            sequence n, below 0 where that is not wanted. Where a sequence has fewer tokens, nothing
            is left, whatever is listed. T is that of q, of packed sequences the tokens of all.
    """

    pool: Tensor
    rows: Tensor

    def pointers(self) -> Mapping[str, Tensor | None]:
        """Arguments of a kernel."""
        return {"pool_ptr": self.pool, "to_ptr": self.rows}


NO_POINTERS: Mapping[str, Tensor | None] = MappingProxyType({"pool_ptr": None, "to_ptr": None})


class NoKernel(Exception):
    """No kernel takes a call that is to leave states on its way."""


def every(pool: Tensor, cu_seqlens: Tensor, total: int, tokens: int) -> PrefixStates:
    """One state after each `tokens`, a multiple of 64, of packed sequences, none after a remainder:
    rows of the pool from the first on, sequence by sequence. Nothing waits for the device."""
    if tokens < 1 or tokens % BLOCK:
        raise ValueError(f"every: want a multiple of {BLOCK} tokens, got {tokens}")
    counts = cu_seqlens.diff() // tokens
    first = counts.cumsum(0) - counts
    ends = torch.arange(1, -(-total // BLOCK) + 1, device=cu_seqlens.device) * BLOCK
    number = ends // tokens
    wanted = (ends % tokens == 0) & (number <= counts[:, None])
    return PrefixStates(pool, torch.where(wanted, first[:, None] + number - 1, -1).int())


def check(prefix: PrefixStates, terms: LinearInputs, *others: Tensor) -> PrefixStates:
    """It, with rows that the pool has not, and those past a sequence's end, as none. others:
    arguments that are not among the terms.

    Raises:
        ValueError, TypeError: it does not fit the terms.
        NotImplementedError: with gradients or under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("prefix_states: not under torch.compile")
    if needs_autograd(*terms, *others):
        raise NotImplementedError("prefix_states: not with gradients; want torch.no_grad()")
    N, HV, K, V = terms.state_shape
    pool, rows = prefix
    checks.expect_rank("prefix_states.pool", pool, 4, "[rows, HV, V, K]")
    checks.expect_shape("prefix_states.pool", pool, (pool.shape[0], HV, V, K))
    checks.expect_shape("prefix_states.rows", rows, (N, -(-terms.q.shape[1] // BLOCK)))
    checks.expect_floating({"prefix_states.pool": pool})
    named = {"q": terms.q, "prefix_states.pool": pool, "prefix_states.rows": rows}
    checks.expect_one_device(named)
    if not pool.is_contiguous():
        raise ValueError("prefix_states.pool: want a contiguous tensor")
    if rows.dtype != torch.int32:
        raise TypeError(f"prefix_states.rows: want int32, got {rows.dtype}")
    none = rows >= pool.shape[0]
    if terms.cu_seqlens is not None:
        blocks = torch.arange(rows.shape[1], device=rows.device)
        none |= blocks >= (terms.cu_seqlens.diff() // BLOCK)[:, None]
    elif terms.q.shape[1] % BLOCK:
        none[:, -1] = True
    return PrefixStates(pool, rows.masked_fill(none, -1).contiguous())


def by_calls(
    call: Callable[[LinearInputs], Any], terms: LinearInputs, prefix: PrefixStates
) -> tuple[Tensor, Tensor]:
    """o and the final states, of call(terms) for each sequence and each piece of it between states
    that are prefix. Waits for offsets and rows."""
    T, start, cu = terms.q.shape[1], terms.initial_state, terms.cu_seqlens
    start = None if start is None else start.clone()  # it may be rows of the pool
    places = [(n, 0, T) for n in range(terms.q.shape[0])]
    if cu is not None:
        places = [(0, begin, end) for begin, end in pairwise(cu.tolist())]
    outputs, finals = [], []
    for n, (row, begin, end) in enumerate(places):
        state = None if start is None else start[n : n + 1]
        rows = {BLOCK * (j + 1): to for j, to in enumerate(prefix.rows[n].tolist()) if to >= 0}
        cuts = [0, *(x for x in rows if x < end - begin), end - begin]
        pieces = []
        for at, stop in pairwise(cuts):
            tokens = slice(begin + at, begin + stop)
            piece = terms.of_tokens(lambda x: x[row : row + 1, tokens])  # noqa: B023
            o, state, *_ = call(piece._replace(initial_state=state, cu_seqlens=None))
            if stop in rows:
                prefix.pool[rows[stop]] = state[0].mT
            pieces.append(o)
        outputs.append(torch.cat(pieces, 1))
        assert state is not None
        finals.append(state)
    if not outputs:
        o, final, *_ = call(terms)
        return o, final
    o = torch.cat(outputs, 0 if cu is None else 1)
    if cu is not None and o.shape[1] < T:  # tokens past the last sequence
        o = torch.cat([o, o.new_zeros(1, T - o.shape[1], *o.shape[2:])], 1)
    return o, torch.cat(finals)
