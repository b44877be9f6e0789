"""Argument checks of the public functions: each names the argument, what was wanted, what came.

They read shapes, dtypes, devices and plain numbers, never values of tensors, so they never
synchronise a device and trace under torch.compile.
"""

import functools
import inspect
import math
import numbers
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")
# Under this name a function may have another, which `operator` calls for consistent=True.
CONSISTENT = "_consistent"
# And under this one that for prefix trees: with `parents`, or with a context that is one.
IN_TREE = "_in_tree"


def is_on(variable: str) -> bool:
    """Whether a variable of the environment, which is on if it is not set, is on.

    Raises:
        ValueError: it is neither on nor off.
    """
    value = os.environ.get(variable, "on")
    if value not in ("on", "1", "off", "0"):
        raise ValueError(f"{variable}: want on or off, got {value!r}")
    return value in ("on", "1")


def operator(fn: Callable[P, R]) -> Callable[P, R]:
    """A public function that refuses arguments of types that its annotations do not name.

    A parameter annotated `Tensor` takes tensors, `Tensor | None` None too, and so on for every
    type in the union; `tuple[Tensor, Tensor]` takes tuples of tensors. `int` takes integers of
    NumPy too, and `float` any real number; neither takes a tensor, whose gradient would be lost.

    Raises:
        TypeError: names the argument, before anything else looks at it.
    """
    parameters = inspect.signature(fn).parameters.values()
    names = tuple(x.name for x in parameters if x.kind is not inspect.Parameter.KEYWORD_ONLY)
    types_of = {x.name: _Types(x.annotation) for x in parameters}
    # without an attribute or a call for what needs no other look
    exact = {name: types.exact for name, types in types_of.items()}
    by_place = tuple(exact[name] for name in names)
    called, consistent = fn.__name__, getattr(fn, CONSISTENT, None)
    in_tree = getattr(fn, IN_TREE, None)

    def expect_types(args: tuple, kwargs: dict[str, Any]) -> None:
        if len(args) > len(names):
            return  # Python's own error: options are given by name
        for name, x in {**dict(zip(names, args)), **kwargs}.items():
            if name in types_of:
                types_of[name].expect(name, x)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for x, types in zip(args, by_place):
            if type(x) not in types:
                expect_types(args, kwargs)
                break
        if kwargs:
            for name in kwargs:
                if name in exact and type(kwargs[name]) not in exact[name]:
                    types_of[name].expect(name, kwargs[name])
        run = consistent if consistent and kwargs.get("consistent") else fn
        if in_tree and kwargs:
            parents = kwargs.get("parents")
            if parents is None:
                parents = getattr(kwargs.get("context"), "parents", None)
            run = run if parents is None else in_tree
        if is_dynamo_compiling():
            places = apart(args), apart(tuple(kwargs.values()), args)
            return run(*places[0], **dict(zip(kwargs, places[1])))
        running = _thread.running
        if running.name:
            return run(*args, **kwargs)
        running.name = called
        try:
            return run(*args, **kwargs)
        except Exception as error:
            expect_dense({**dict(zip(names, args)), **kwargs}, error)
            raise
        finally:
            running.name = ""

    return call


def expect_dense(args: Mapping[str, Any], error: Exception) -> None:
    """Raises a TypeError for what a call failed at if that has another layout than torch.strided.
    Nobody asks before a call fails, which costs nothing."""
    for name, given in args.items():
        for i, x in enumerate(given if isinstance(given, tuple) else (given,)):
            if not isinstance(x, Tensor):
                continue
            if x.layout != torch.strided or x.is_nested or x.is_quantized:
                place = f"{name}[{i}]" if isinstance(given, tuple) else name
                kind = "nested" if x.is_nested else "quantized" if x.is_quantized else x.layout
                raise TypeError(f"{place}: want a dense tensor, got one that is {kind}") from error


def plain_int(n: Any) -> Any:
    """A size for operations that take no tensor in its place, or none of a CPU beside a GPU's. To
    torch.jit.trace sizes are such tensors; its graph keeps this one as a number."""
    return int(n) if isinstance(n, Tensor) else n


def apart(values: tuple, others: tuple = ()) -> tuple:
    """The values, with a view in the place of a tensor that has come before: Dynamo does not trace
    an autograd.Function that gets one twice."""
    found: list[Any] = []
    for x in values:
        again = isinstance(x, Tensor) and any(x is y for y in (*others, *found))
        found.append(x.view_as(x) if again else x)
    return tuple(found)


class _Running:
    """The public function that a thread is inside of, and "" outside of all."""

    __slots__ = ("name",)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running = _Running()
        self.running.name = ""


_thread = _Thread()


def caller() -> str:
    """The public function that the user called, or "" outside of all."""
    return _thread.running.name


def name_of_caller(otherwise: str, name: str | None = None) -> str:
    """What errors from deep inside call the public function that the user called.

    otherwise: a registered operator's name, which has an underscore that no user wrote.
    name: what `caller` said; None asks it.
    """
    name = caller() if name is None else name
    return f"slipstream.ops.{name}" if name else otherwise.replace("::_", "::")


_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# what passes for a type that an annotation names, and how errors call it
_ALSO: dict[type, tuple[type, ...]] = {
    int: (numbers.Integral, torch.SymInt),
    float: (int, numbers.Real, torch.SymInt, torch.SymFloat),
    bool: (torch.SymBool,),
}
_WORDS = {Tensor: "a torch.Tensor", type(None): "None", float: "a number", int: "an integer"}


class _Types:
    """The values that a parameter's annotation allows.

    exact: types of which no object needs another look.
    types: those that isinstance() takes.
    entries: of each tuple that may come, the types of its entries.
    words: for errors.
    """

    def __init__(self, annotation: Any) -> None:
        union = get_origin(annotation) in (Union, UnionType)
        members = get_args(annotation) if union else (annotation,)
        tuples = [get_args(m) for m in members if get_origin(m) is tuple]
        plain = tuple(m for m in members if get_origin(m) is None)
        self.exact = (*plain, Parameter) if Tensor in plain else plain
        anything = Any in members or inspect.Parameter.empty in members
        self.types = (object,) if anything else sum(map(_and_also, plain), ())
        self.entries = tuple(tuple(map(_and_also, entries)) for entries in tuples)
        self.words = " or ".join(map(_word, members))

    def expect(self, name: str, x: object) -> None:
        if isinstance(x, self.types):
            return
        got = type(x).__name__
        if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64):
            # a pair of integers, as flash_attn's tests have their window
            pair = [torch.Size([len(y)]) for y in self.entries if all(int in z for z in y)]
            if x.shape in pair:
                return
        if isinstance(x, tuple | list):
            for entries in self.entries:
                # a list of numbers, as JSON has them, is a tuple too
                fits = isinstance(x, tuple) or (Tensor,) not in entries
                if fits and len(x) == len(entries) and all(map(isinstance, x, entries)):
                    return
        if isinstance(x, tuple):
            got = f"({', '.join(type(y).__name__ for y in x)})"
        raise TypeError(f"{name}: want {self.words}, got {got}")


def _word(member: Any) -> str:
    if get_origin(member) is tuple:
        return f"a tuple ({', '.join(x.__name__ for x in get_args(member))})"
    return _WORDS.get(member) or member.__name__


def _and_also(member: type) -> tuple[type, ...]:
    return (member, *_ALSO.get(member, ()))


def device_type(x: Tensor) -> str:
    """x.device.type, which makes a string, at seven times the cost of asking is_cpu."""
    return "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), which takes nearly as long as an operation where there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of arithmetic: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in that dtype."""
    return x if x.dtype == torch.float64 else x.float()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which autocast, if on for x's device, casts x; None if it leaves x alone."""
    device = device_type(x)
    if x.dtype == torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def expect_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: want a torch.Tensor, got {type(x).__name__}")


def expect_rank(name: str, x: Tensor, rank: int, layout: str) -> None:
    """`layout` says what the dimensions are, such as "[B, T, H, K]"."""
    if not isinstance(x, Tensor):
        expect_tensor(name, x)
    if x.dim() != rank:
        raise ValueError(f"{name}: want {rank} dimensions {layout}, got shape {tuple(x.shape)}")


def expect_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    if not isinstance(x, Tensor):
        expect_tensor(name, x)
    # one comparison where they are equal, as tuples are; each size by itself where they may not be
    if x.shape == shape:
        return
    if x.dim() != len(shape) or any(have != want for have, want in zip(x.shape, shape)):
        raise ValueError(f"{name}: want shape {tuple(shape)}, got {tuple(x.shape)}")


def expect_layouts(**tensors: tuple[Tensor | None, str]) -> dict[str, int]:
    """Dimensions by letters, such as "B D T"; of each letter the first size is what all want.

        expect_layouts(u=(u, "B D T"), A=(A, "D N"))

    A number among the letters is that size. None is passed over. Returns the sizes by letter.
    """
    sizes: dict[str, int] = {}
    for name, (x, layout) in tensors.items():
        if x is None:
            continue
        letters = layout.split()
        wanted = [int(a) if a.isdigit() else sizes.get(a) for a in letters]
        # not `in`: torch.compile finds no number in a tuple where one of them is of a dynamic size
        differs = any(w is not None and w != n for w, n in zip(wanted, x.shape))
        if x.dim() != len(letters) or differs:
            named = (
                a if w is None or a.isdigit() else f"{a} = {w}" for a, w in zip(letters, wanted)
            )
            raise ValueError(f"{name}: want [{', '.join(named)}], got shape {tuple(x.shape)}")
        sizes |= {a: n for a, n in zip(letters, x.shape) if a not in sizes}
    return sizes


def expect_floating(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name}: want a floating dtype, got {x.dtype}")


def expect_index(name: str, x: Tensor | None, shape: Sequence[int] | None = None) -> None:
    """x has whole numbers, if it is given, and that shape, if one is wanted."""
    if x is not None and shape is not None:
        expect_shape(name, x, shape)
    if x is not None and x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: want int32 or int64, got {x.dtype}")


def expect_one_dtype(tensors: Mapping[str, Tensor | None]) -> None:
    """All given tensors have the dtype of the first, one of fp16, bf16, fp32, fp64."""
    first, wanted = "", None
    for name, x in tensors.items():
        if x is None:
            continue
        if wanted is None:
            first, wanted = name, x.dtype
            if wanted not in _FLOATING:
                raise TypeError(
                    f"{first}: want float16, bfloat16, float32 or float64, got {wanted}"
                )
        elif x.dtype != wanted:
            raise TypeError(
                f"{name}: want {wanted} like {first}, got {x.dtype}; cast one to the other"
            )


def expect_one_device(tensors: Mapping[str, Tensor | None]) -> None:
    first, wanted = "", None
    for name, x in tensors.items():
        if x is None:
            continue
        if wanted is None:
            first, wanted = name, x.device
        elif x.device != wanted:
            raise ValueError(f"{name}: want device {wanted} like {first}, got {x.device}")


def expect_own_memory(name: str, x: Tensor | None) -> None:
    """x is written in place, so none of its numbers may be there more than once, as expand has it:
    programs on a GPU would write it at the same time."""
    if x is None or x.is_contiguous():
        return
    if any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride())):
        raise ValueError(
            f"{name}: is written in place, and its strides {x.stride()} have several of its "
            f"{list(x.shape)} numbers in one place; clone it"
        )


def expect_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if of <= 0 or value % of != 0:
        raise ValueError(f"{name}: want a multiple of {of_name} = {of}, got {value}")


def expect_not_negative(name: str, value: float) -> None:
    """Raises ValueError for a negative number and for NaN."""
    if not value >= 0:
        raise ValueError(f"{name}: want 0 or more, got {value}")


def expect_power_of_two(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{name}: want a power of two from {low} to {high}, got {value!r}")


def expect_lower_bound(lower_bound: float | None) -> None:
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise ValueError(f"lower_bound: want a number below 0, got {lower_bound}")


def expect_cu_seqlens(
    cu_seqlens: Tensor, batch: int, tokens: int, *, name: str = "cu_seqlens"
) -> None:
    """Shape and dtype only; values are checked where they are on the host (common/varlen.py)."""
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
