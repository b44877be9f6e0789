"""Copies of states by their indices, against a loop."""

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from slipstream.kernels.elementwise.copy_states import copy_states
from tests.support.user_inputs import stepped, transposed

# an odd number of heads, and sizes of several tiles, of which the last ones are not full
SIZE, POOL = (3, 40, 72), 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = [[4, -1, 2, 0], [5], [-1, POOL, -(1 << 30)], [POOL, 1, 1 << 30], []]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "V first": lambda x: x,
    "K first": lambda x: x.mT.contiguous().mT,
    "of a layer": lambda x: torch.stack([x, x], 1)[:, 1],
    "every second": stepped,
    "reversed": transposed,
}


def check(
    x: Tensor, sources: list[int] | None, y: Tensor, targets: list[int] | None, impl: str
) -> None:
    """Zeros of a slot that the source has not; what the target has no slot for is left."""
    want = y.clone()
    for n in range(len(sources or targets or [])):
        at, to = (n if slots is None else slots[n] for slots in (sources, targets))
        if 0 <= to < len(y):
            want[to] = x[at].to(y.dtype) if 0 <= at < len(x) else 0
    slots = {}
    for name, given, kind in (
        ("source_indices", sources, torch.int32),
        ("target_indices", targets, torch.int64),
    ):
        slots[name] = None if given is None else torch.tensor(given, dtype=kind, device=x.device)
    copy_states(x, y, **slots, impl=impl)
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)


def check_copies(impl: str, device: str = "cpu", size: tuple[int, int, int] = SIZE) -> None:
    for slots, (name, layout), dtype in product(SLOTS, LAYOUTS.items(), DTYPES):
        pools = torch.randn(2, POOL, *size, device=device).to(dtype)
        pools[:, 3] = torch.nan  # a row that no index names
        # numbers that both dtypes have: the interpreter does not round to bfloat16
        rows = torch.randn(len(slots), *size, device=device).to(dtype).float().mT.contiguous().mT
        check(layout(pools[0]), slots, rows.clone(), None, impl)
        check(rows, None, layout(pools[0]), slots, impl)
        if name in ("V first", "K first"):  # from pool to pool, both of this layout
            other = [*slots[1:], *slots[:1]]
            check(layout(pools[0]), slots, layout(pools[1]), other, impl)
