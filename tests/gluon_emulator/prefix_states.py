"""States that emulated kernels leave on their way, against the oracle's of each prefix."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.kernels.linear.reference import linear_reference
from tests.gluon_emulator import threads
from tests.gluon_emulator.linear import Pointer

GRID = 64


@contextmanager
def expecting_prefix_states(terms: LinearInputs) -> Iterator[None]:
    """Launches within get a pool and rows for about two thirds of the places; then those have to
    be the states there, and no other row is written."""
    T, (N, HV, K, V) = terms.v.shape[1], terms.state_shape
    places = [(n, 0, T) for n in range(terms.v.shape[0])]
    if terms.cu_seqlens is not None:
        places = [(0, *x) for x in pairwise(terms.cu_seqlens.tolist())]
    rows = torch.full((N, -(-T // GRID)), -1, dtype=torch.int32)
    wanted = [(n, j) for n, (_, a, b) in enumerate(places) for j in range((b - a) // GRID)]
    wanted = wanted if len(wanted) < 3 else [x for i, x in enumerate(wanted) if i % 3 != 1]
    order = torch.randperm(len(wanted) + 2)
    for to, (n, j) in zip(order, wanted):
        rows[n, j] = to
    pool = torch.full((len(order), HV, V, K), torch.nan, dtype=torch.float64)
    launch = threads.launch

    def with_prefix_states(*args: Any, **flags: Any) -> None:
        launch(*args, **flags, pool_ptr=Pointer(pool), to_ptr=Pointer(rows))

    with mock.patch.object(threads, "launch", with_prefix_states):
        yield
    assert wanted
    for n, j in wanted:
        row, begin, _ = places[n]
        tokens = slice(begin, begin + GRID * (j + 1))
        start = None if terms.initial_state is None else terms.initial_state[n : n + 1]
        prefix = terms.of_tokens(lambda x: x[row : row + 1, tokens])  # noqa: B023
        _, state = linear_reference(prefix._replace(initial_state=start, cu_seqlens=None), 1.0)
        torch.testing.assert_close(pool[rows[n, j]], state[0].mT, rtol=1e-8, atol=1e-8)
    left = [int(to) for to in order[len(wanted) :]]
    assert pool[left].isnan().all()
