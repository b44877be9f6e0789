"""Argument checks of the public functions: each names the argument, what was wanted, what came.

They read shapes, dtypes and devices only, never values, so they never synchronise a device and
trace under torch.compile.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def operator(fn: Callable[P, R]) -> Callable[P, R]:
    """A public function that refuses what is no tensor where its annotation says Tensor.

    A parameter annotated `Tensor` takes tensors, `Tensor | None` None too, and so on for every
    type in the union; `tuple[Tensor, Tensor]` takes tuples of tensors.

    Raises:
        TypeError: names the argument, before anything else looks at it.
    """
    types_of = _tensor_types(fn)
    parameters = inspect.signature(fn).parameters.values()
    names = tuple(x.name for x in parameters if x.kind is not inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(names):
            return fn(*args, **kwargs)  # Python's own error: options are given by name
        for name, x in zip(names, args):
            if type(x) is not Tensor and name in types_of:
                _expect_type(name, x, types_of[name])
        for name, x in kwargs.items():
            if type(x) is not Tensor and name in types_of:
                _expect_type(name, x, types_of[name])
        if torch.compiler.is_compiling() or _running.name:
            return fn(*args, **kwargs)
        _running.name = fn.__name__
        try:
            return fn(*args, **kwargs)
        finally:
            _running.name = ""

    return call


class _Running(threading.local):
    """The public function that this thread is inside of, and "" outside of all."""

    name = ""


_running = _Running()


def name_of_caller(otherwise: str) -> str:
    """What errors from deep inside call the public function that the user called."""
    return f"slipstream.ops.{_running.name}" if _running.name else otherwise


def _tensor_types(fn: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """The types that each parameter takes, of those that take tensors."""
    found = {}
    for name, parameter in inspect.signature(fn).parameters.items():
        members = get_args(parameter.annotation) or (parameter.annotation,)
        if any(x is Tensor or Tensor in get_args(x) for x in members):
            found[name] = tuple(get_origin(x) or x for x in members)
    return found


def _expect_type(name: str, x: object, types: tuple[type, ...]) -> None:
    if not isinstance(x, types):
        words = {Tensor: "a torch.Tensor", type(None): "None"}
        wanted = " or ".join(words.get(t, t.__name__) for t in types)
        raise TypeError(f"{name}: want {wanted}, got {type(x).__name__}")
    if isinstance(x, tuple):
        for y in x:
            expect_tensor(name, y)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast, if on for x's device, makes of x; None if it leaves x alone."""
    device = x.device.type
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def expect_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: want a torch.Tensor, got {type(x).__name__}")


def expect_rank(name: str, x: Tensor, rank: int, layout: str) -> None:
    """`layout` says what the dimensions are, such as "[B, T, H, K]"."""
    expect_tensor(name, x)
    if x.dim() != rank:
        raise ValueError(f"{name}: want {rank} dimensions {layout}, got shape {tuple(x.shape)}")


def expect_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    expect_tensor(name, x)
    if x.dim() != len(shape) or any(have != want for have, want in zip(x.shape, shape)):
        raise ValueError(f"{name}: want shape {tuple(shape)}, got {tuple(x.shape)}")


def expect_floating(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name}: want a floating dtype, got {x.dtype}")


def expect_one_dtype(tensors: Mapping[str, Tensor | None]) -> None:
    """All given tensors have the dtype of the first, one of fp16, bf16, fp32, fp64."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first, x = next(iter(given.items()))
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{first}: want float16, bfloat16, float32 or float64, got {x.dtype}")
    for name, y in given.items():
        if y.dtype != x.dtype:
            raise TypeError(
                f"{name}: want {x.dtype} like {first}, got {y.dtype}; cast one to the other"
            )


def expect_one_device(tensors: Mapping[str, Tensor | None]) -> None:
    given = {name: x for name, x in tensors.items() if x is not None}
    first, x = next(iter(given.items()))
    for name, y in given.items():
        if y.device != x.device:
            raise ValueError(f"{name}: want device {x.device} like {first}, got {y.device}")


def expect_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if of == 0 or value % of != 0:
        raise ValueError(f"{name}: want a multiple of {of_name} = {of}, got {value}")


def expect_power_of_two(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name}: want a power of two from {low} to {high}, got {value!r}")


def expect_lower_bound(lower_bound: float | None) -> None:
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound: want a number in [-5, 0), got {lower_bound}")


def expect_cu_seqlens(
    cu_seqlens: Tensor, batch: int, tokens: int, *, name: str = "cu_seqlens"
) -> None:
    """Shape and dtype only; the values are checked where they are on the host (core.varlen)."""
    expect_rank(name, cu_seqlens, 1, "[N+1]")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: want int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: want at least one offset, [0], got an empty tensor")
    if batch != 1:
        raise ValueError(
            f"{name}: packed sequences want batch size 1, got {batch}; "
            "flatten [B, T, ...] to [1, B*T, ...]"
        )
    if cu_seqlens.shape[0] == 1 and tokens:
        raise ValueError(
            f"{name}: want offsets from 0 to the {tokens} tokens given, got one offset"
        )
