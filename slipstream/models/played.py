"""Plays a block without gradients from a record of its launches (runtime/call_replay.py).

A short prompt takes the host longer than the GPU: its time is Python's, from the block to the
launches. What a block launches follows from its modules, their options and the sizes of tensors. So
blocks that are alike share a record, whose arguments are the block's inputs, parameters and
buffers. A block whose options, modules or hooks have changed since it was recorded is another kind.
"""

import threading
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from slipstream.nn import decoding
from slipstream.runtime import backends, call_replay, consistent, custom_op

MISS = call_replay.MISS
# What each module has.
_OWN = frozenset(nn.Module().__dict__) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What parameters' first values follow from, or a gradient, or an error's text.
_NOT_READ = frozenset(("layer_idx", "num_layers", "initial_bias"))
_PLAIN = (int, float, str, bool, type(None), torch.dtype, type, FunctionType, BuiltinFunctionType)


class _Kind:
    """The key of the records of blocks that are alike. names: of their state's tensors."""

    names: tuple[str, ...] = ()


class _Unlike(Exception):
    """A block that is of no kind: what it does may follow from more than a record sees."""


_KINDS: WeakValueDictionary[tuple, _Kind] = WeakValueDictionary()


class _Seen:
    """A block as it was, and its kind; None for one of no kind."""

    def __init__(self, block: nn.Module) -> None:
        self._live: list[Any] = []
        self._was: list[Any] = []
        self._tensors: list[dict[str, Any]] = []
        try:
            places = {module: i for i, module in enumerate(block.modules())}
            signature = tuple(part for m in places for part in self._parts(m, places))
        except _Unlike:
            self.kind = None
        else:
            self.kind = _KINDS.setdefault(signature, _Kind())

    def _parts(self, module: nn.Module, places: dict[Any, int]) -> Iterator[Any]:
        own = vars(module)
        known = type(module).__module__.startswith(("slipstream.", "torch.nn.modules."))
        self._watch(own, *(own[name] for name in (*_HOOKS, "_modules")))
        if not known or module.training or "forward" in own or any(own[x] for x in _HOOKS):
            raise _Unlike
        self._tensors += own["_parameters"], own["_buffers"]
        yield type(module)
        yield tuple((name, places.get(child)) for name, child in own["_modules"].items())
        yield from map(tuple, self._tensors[-2:])
        unread = () if getattr(module, "depends_on_layer", False) else _NOT_READ
        yield from ((x, self._value(own[x])) for x in sorted(own.keys() - _OWN - {*unread}))

    def tensors(self) -> list[Any]:
        """The parameters and buffers as they are now, none of them twice; empty if the block is not
        what it was."""
        try:
            if self._live != self._was:
                return []
        except RuntimeError:  # there is a tensor where there was something else
            return []
        found = [x for own in self._tensors for x in own.values()]
        distinct = {id(x) for x in found if x is not None}
        return found if len(distinct) == len(found) - sum(x is None for x in found) else []

    def _watch(self, *of: Any) -> None:
        self._live += of
        self._was += map(type(of[0]), of)

    def _value(self, x: Any) -> Any:
        if isinstance(x, _PLAIN):
            return x
        if isinstance(x, tuple):
            return tuple(map(self._value, x))
        if isinstance(x, list | dict):
            self._watch(x)
            return tuple(map(self._value, x.items() if isinstance(x, dict) else x))
        raise _Unlike


class _Forwards(custom_op.DirectCall):
    """Forwards of blocks by their inputs, kind and tensors."""

    _detach = False  # the modules within hold the tensors that the record has as arguments

    def __init__(self) -> None:
        super().__init__(self._forward, max_operations=None)
        self._here = threading.local()

    def _forward(self, h: Tensor, first_value: Tensor | None, *args: Any) -> tuple:
        use_cache, kind, *_ = args
        with decoding.own_tables():
            h, state, value = self._here.block.from_start(h, first_value, use_cache)
        if state is not None:
            kind.names = tuple(state)
        return h, value, *(state or {}).values()

    def _expect(self, known: call_replay.Records, args: tuple) -> None:
        known.due = True  # the operators within have their kernels compiled

    def play(self, block: Any, *args: Any) -> Any:
        self._here.block = block
        try:
            return self._replayed(args)
        finally:
            self._here.block = None


_FORWARDS = _Forwards()
_SEEN: WeakKeyDictionary[nn.Module, _Seen] = WeakKeyDictionary()


def play(block: Any, h: Tensor, first_value: Tensor | None, use_cache: bool) -> Any:
    """block.from_start(h, first_value, use_cache), or MISS where that has to be called: for
    gradients, within a scope or a mode, on a CPU, and for the first calls of a kind."""
    if (
        torch.is_grad_enabled()
        or not call_replay.is_enabled(h)
        or not backends.is_plain_call(h)
        or torch._C._len_torch_function_stack()
        or h.numel() == 0
        or torch.is_autocast_enabled(h.device.type)
        or consistent.consistent_scope.on
        or consistent.consistent_scope.step is not None
        or consistent.prefix_scope.prefixes is not None
        or _has_any_global_hook()
    ):
        return MISS
    seen = _SEEN.get(block)
    tensors = [] if seen is None else seen.tensors()
    if seen is None or not tensors:
        seen = _SEEN[block] = _Seen(block)
        tensors = seen.tensors()
    kind = seen.kind if tensors else None
    if kind is None or any(x is not None and x.device != h.device for x in tensors):
        return MISS
    found = _FORWARDS.play(block, h, first_value, use_cache, kind, *tensors)
    if found is MISS:
        return MISS
    h, value, *state = found
    return h, dict(zip(kind.names, state)) if use_cache else None, value
