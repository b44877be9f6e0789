"""Rows of a tensor to copy, and the way back for gradients: sums of each row's copies in order.

slipstream::_row_sums does both in one launch, into memory that there is:

    y[to[i]] (+)= sum_j x[index[j]]          j = starts[i] .. starts[i + 1] - 1
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import autograd, custom_op, dispatch
from slipstream.runtime.context_parallel import copied


class Rows:
    """Rows of a tensor to copy, a negative one for zeros, and for gradients the way back.

    index: int64 [M], on a CPU.
    """

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self._tables: dict[tuple[str, torch.device], tuple[Tensor, ...]] = {}

    def copy(self, x: Tensor) -> Tensor:
        """x[index], of x [S, ...], with its gradient."""
        return _Copy.apply(x, self)

    def index_on(self, device: torch.device) -> Tensor:
        return self._on("rows", device, lambda: (self.index,))[0]

    def taken(self, x: Tensor) -> Tensor:
        """Without a gradient."""
        index, absent = self._on("taken", x.device, self._there)
        y = x.index_select(0, index) if x.shape[0] else x.new_zeros(index.shape[0], *x.shape[1:])
        return y.index_fill_(0, absent, 0) if absent.shape[0] else y

    def windows(self, x: Tensor, width: int) -> Tensor:
        """The rows of x [T, D], `width` of each window [N, D, width], without a gradient."""
        y = x.new_empty(self.index.shape[0] // width, x.shape[1], width)
        row_sums(flat(x), self.index_on(x.device), None, None, y.mT)
        return y

    def returned(self, grad: Tensor, size: int) -> Tensor:
        """The gradient of x [size, ...], each row's in the order of the index."""
        order, *starts = self._on(str(size), grad.device, lambda: self._back_of(size))
        if not starts:
            return grad.index_select(0, order)
        y = grad.new_empty(size, *grad.shape[1:])
        row_sums(flat(grad), order, starts[0], None, flat(y))
        return y

    def added(self, to: Tensor, grad: Tensor) -> Tensor:
        """to [S, ...] and the gradient of its copies, as row_sums takes them. to is overwritten
        where it is on a GPU."""
        order, starts, rows = self._on("back", grad.device, self._back)
        to = to if to.is_cuda and to.is_contiguous() else to.clone()
        row_sums(grad, order, starts, rows, flat(to), add=True)
        return to

    def _on(
        self, name: str, device: torch.device, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        if (name, device) not in self._tables:
            self._tables[name, device] = tuple(copied(x, device) for x in make())
        return self._tables[name, device]

    def _there(self) -> tuple[Tensor, ...]:
        return self.index.clamp(min=0), (self.index < 0).nonzero()[:, 0]

    def _back(self) -> tuple[Tensor, ...]:
        """Places of the copies, sorted by row, where each one's copies begin, and the rows."""
        found, order = self.index.sort(stable=True)
        absent = int((found < 0).sum())
        rows, counts = found[absent:].unique_consecutive(return_counts=True)
        return order[absent:], torch.nn.functional.pad(counts.cumsum(0), (1, 0)), rows

    def _back_of(self, size: int) -> tuple[Tensor, ...]:
        """The first two of these, of all rows; the first alone where each has one copy."""
        counts, order = torch.bincount(self.index[self.index >= 0], minlength=size), self._back()[0]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return (order,) if bool((counts == 1).all()) else (order, starts)


class _Copy(autograd.Function):
    operator = "slipstream::copy_rows"

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.size = rows, x.shape[0]
        autograd.save(ctx, *autograd.anchors(x))
        return rows.taken(x)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, grad: Tensor) -> Any:
        return ctx.rows.returned(grad, ctx.size), None


class Windows(autograd.Function):
    """x [1, T, D] and windows of its rows, whose gradient goes into that of x: no zeros for all
    others."""

    operator = "slipstream::windows"

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, width: int) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.shape = rows, x.shape
        ctx.set_materialize_grads(False)
        autograd.save(ctx, *autograd.anchors(x))
        return x.view_as(x), rows.windows(x[0], width)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dx: Tensor | None, grad: Tensor | None) -> Any:
        if grad is None:
            return dx, None, None
        dx = grad.new_zeros(ctx.shape) if dx is None else dx
        return ctx.rows.added(dx[0], grad.mT)[None], None, None


def rows_of(ranges: Sequence[range]) -> Rows:
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    return Rows(torch.cat([none, *(torch.arange(x.start, x.stop, device="cpu") for x in ranges)]))


def flat(x: Tensor) -> Tensor:
    """x [S, ...] as [S, 1, all others]."""
    return x.reshape(x.shape[0], 1, math.prod(x.shape[1:]))


def row_sums(
    x: Tensor,
    index: Tensor,
    starts: Tensor | None,
    to: Tensor | None,
    y: Tensor,
    add: bool = False,
    impl: str | None = None,
) -> None:
    """x [A, W, D] and y [A', W', D] of any strides, whose row r is at r // W and r % W.

    index: int64 [M], below 0 for zeros. starts: int64 [N + 1], None for one of each. to: int64 [N],
    no row twice, None for all of y. add: to what y has.
    """
    impl = dispatch.choose(_CANDIDATES, (x, y), impl, "row_sums", x).impls
    _call(x, index, starts, to, y, add, impl)


def _plain(
    x: Tensor, index: Tensor, starts: Tensor | None, to: Tensor | None, y: Tensor, add: bool
) -> None:
    (_, width, D), rows = y.shape, x.flatten(0, 1)
    at = index.clamp(min=0)
    rows = rows.index_select(0, at) if rows.shape[0] else rows.new_zeros(at.shape[0], D)
    rows = checks.widen(rows).where((index >= 0)[:, None], 0)
    if starts is not None and rows.numel():
        options: Any = {"offsets": starts, "axis": 0, "unsafe": True, "initial": 0}
        rows = torch.segment_reduce(rows, "sum", **options)
    elif starts is not None:
        rows = rows.new_zeros(starts.shape[0] - 1, D)
    to = torch.arange(rows.shape[0], device=y.device) if to is None else to
    at = to // width, to % width
    y.index_put_(at, (rows + y[at] if add else rows).to(y.dtype))


def _kind(x: Tensor, y: Tensor) -> KernelKey:
    return ("row_sums.triton", x.dtype, y.dtype)


def _unsupported_reason(x: Tensor, y: Tensor) -> str | None:
    """Why the Triton kernel can't take a call, or None if it can."""
    if y.numel() == 0 or not {x.dtype, y.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return "there are no rows, or they are in neither float32, bfloat16 nor float16"
    return None


_call = custom_op.KernelOp(
    "row_sums",
    "(Tensor x, Tensor index, Tensor? starts, Tensor? to, Tensor(a!) y, bool add, str impl) -> ()",
    fake=lambda *args: None,
    kernel="slipstream.kernels.elementwise.triton.row_sums:row_sums",
    plain=_plain,
    kind=_kind,
    # sums of copies in windows, of which one is absent
    probe={
        "x": lambda x: torch.randn(3, 70, 2, device=x.device).to(x.dtype).mT,
        "index": lambda x: torch.tensor([5, 0, -1, 2, 1], device=x.device),
        "starts": lambda x: torch.tensor([0, 2, 2, 5], device=x.device),
        "to": lambda x: torch.tensor([3, 0, 1], device=x.device),
        "y": (4, 1, 70),
        "add": True,
    },
    replay=True,
)
_CANDIDATES = _call.candidates(_unsupported_reason)
