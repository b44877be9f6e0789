"""slipstream::_copy_states copies states of any float dtypes and strides, in place, by index:

target[target_indices[n]] = source[source_indices[n]]

An index below 0 or past the pool is none: zeros are read, and nothing is written. No gradients.
"""

import torch
from torch import Tensor

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import custom_op, dispatch, kernel_pair

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def copy_states(
    source: Tensor,
    target: Tensor,
    *,
    source_indices: Tensor | None = None,
    target_indices: Tensor | None = None,
    impl: str | None = None,
) -> None:
    """source and target: [.., HV, V, K]; indices: [N], those that are None are 0, 1, ...

    No state is written twice, nor read for one n and written for another.
    """
    indices = target_indices if source_indices is None else source_indices
    if target.numel() == 0 or (indices is not None and indices.shape[0] == 0):
        return
    impls = dispatch.choose(_CANDIDATES, (source, target), impl, "copy_states", source).impls
    _call(source, source_indices, target, target_indices, impl=impls)


def _eager(
    source: Tensor, source_indices: Tensor | None, target: Tensor, target_indices: Tensor | None
) -> None:
    rows = source
    if source_indices is not None:
        is_valid = _is_valid(source, source_indices)
        rows = source.index_select(0, source_indices.where(is_valid, 0))
        rows = rows.where(is_valid.view(-1, 1, 1, 1), 0)
    if target_indices is None:
        target.copy_(rows)
        return
    # a row without an index is written as the first one that has one; if there is none, all write
    # what is in the pool's first state
    is_valid = _is_valid(target, target_indices)
    n = torch.arange(target_indices.shape[0], device=target_indices.device)
    row = torch.where(is_valid, n, is_valid.int().argmax())
    at = target_indices.index_select(0, row).where(is_valid.any(), 0).long()
    rows = rows.index_select(0, row).to(target.dtype)
    target.index_copy_(0, at, rows.where(is_valid.any(), target[:1]))


def _is_valid(pool: Tensor, indices: Tensor) -> Tensor:
    return (indices >= 0) & (indices < pool.shape[0])


def _kind(source: Tensor, target: Tensor) -> KernelKey:
    return ("copy_states.triton", source.dtype, target.dtype)


def _unsupported_reason(source: Tensor, target: Tensor) -> str | None:
    """Why the Triton kernel can't take a call, or None if it can."""
    if not {source.dtype, target.dtype} <= {*_DTYPES}:
        return "a pool is in neither float32, bfloat16 nor float16"
    return None


def _probe_rows(source: Tensor) -> Tensor:
    return torch.tensor([4, -1, 2], device=source.device)


_call = custom_op.KernelOp(
    "copy_states",
    "(Tensor source, Tensor? source_indices, Tensor(a!) target, Tensor? target_indices, str impl)"
    " -> ()",
    fake=lambda *args: None,
    kernel="slipstream.kernels.elementwise.triton.copy_states:copy_states",
    plain=_eager,
    kind=_kind,
    # three states to rows that lie K first, and from them; one has none
    probe=(
        {
            "source": (5, 2, 70, 40),
            "source_indices": _probe_rows,
            "target": lambda target: kernel_pair.random_like(target, 3, 2, 40, 70).mT,
            "target_indices": None,
        },
        {
            "source": lambda source: kernel_pair.random_like(source, 5, 2, 40, 70).mT,
            "source_indices": _probe_rows,
            "target": (5, 2, 70, 40),
            "target_indices": _probe_rows,
        },
    ),
    replay=True,
)
_CANDIDATES = _call.candidates(_unsupported_reason)
