"""Tensors that the backward makes again instead of keeping them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.runtime.autograd import by_operation

# Elements of the widest tensor from which on it is done: below, a step is bound by the host.
MIN_ELEMENTS = 1 << 23


class _Saved:
    """The object that autograd saves for a tensor: the tensor, or its place among those that are
    computed again."""

    __slots__ = ("place", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # without its graph, which holds this object: both would stay where no backward runs
        self.tensor: Tensor | None = tensor.detach()
        self.version = None if tensor.is_inference() else tensor._version
        self.place: tuple[int, Any, Any, Any] | None = None

    def unchanged(self) -> Tensor:
        """The tensor; autograd itself does not look where it has hooks."""
        assert self.tensor is not None
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {list(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version}"
            )
        return self.tensor


class Recompute:
    """Has the backward call `make` again, without gradients, for what it returned and what is
    saved of that.

        with Recompute(make, numel) as made:
            y = operator(*made[-3:])

    Args:
        make: cheap and without side effects; returns all tensors that shall not be kept, those in
            between too, laid out alike each time. It reads no module: parameters may be others in
            the backward. What it reads is kept.
        elements: of the widest tensor; few are kept as ever.

    Nothing is done differently under torch.compile, torch.func and autocast, without gradients, and
    where somebody else, such as activation checkpointing, decides what is kept.

    Raises:
        NotImplementedError: in a backward with create_graph=True.
        RuntimeError: in a backward, if what it reads was changed in place.
    """

    def __init__(self, make: Callable[[], list[Tensor]], elements: int) -> None:
        self._make = make
        self._hooks: Any = None
        self._packed: list[_Saved] | None = []
        self._read: list[_Saved] = []
        self._storages: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._made: list[Tensor] | None = None
        self._left = self._count = 0
        # in this order: a number of elements may be a symbol elsewhere
        if not by_operation() and elements >= MIN_ELEMENTS and _may_save():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> list[Tensor]:
        if self._hooks is None:
            return self._make()
        self._hooks.__enter__()
        try:
            made = self._make()
        except BaseException:
            self._hooks.__exit__()
            self._hooks = None
            raise
        self._storages = {x.untyped_storage().data_ptr(): i for i, x in enumerate(made)}
        self._alive = made.copy()  # or their memory might be another's before the block ends
        packed, self._packed = self._packed or [], None
        for saved in packed:
            self._place(saved)
        self._read = [x for x in packed if x.tensor is not None]
        return made

    def __exit__(self, *error: object) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(*error)
            self._hooks = None  # which hold this object
            self._storages.clear()
            self._alive.clear()

    def _pack(self, x: Tensor) -> _Saved:
        saved = _Saved(x)
        if self._packed is None:
            self._place(saved)
        else:
            self._packed.append(saved)  # perhaps one of those that are being made
        return saved

    def _place(self, saved: _Saved) -> None:
        x = saved.tensor
        assert x is not None
        i = self._storages.get(x.untyped_storage().data_ptr())
        if i is not None:
            saved.place = i, x.shape, x.stride(), x.storage_offset()
            saved.tensor = None
            self._count += 1

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.place is None:
            return saved.unchanged()
        if torch.is_grad_enabled():
            raise NotImplementedError("a second derivative is not implemented")
        if self._made is None:
            for read in self._read:
                read.unchanged()
            self._made, self._left = self._make(), self._count
            if torch._C._current_graph_task_id() != -1:
                # a backward of a part may not take them all
                torch.autograd.Variable._execution_engine.queue_callback(self._forget)
        i, size, stride, offset = saved.place
        x = self._made[i].as_strided(size, stride, offset)
        self._left -= 1
        if self._left == 0:
            self._made = None
        return x

    def _forget(self) -> None:
        self._made = None


def _may_save() -> bool:
    if not torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        return False
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    return autograd._top_saved_tensors_default_hooks(True) is None
