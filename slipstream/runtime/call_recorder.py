"""Records a call as a function of its arguments' sizes, which runtime/call_replay.py then calls.

The call runs once, for real, under this mode. Shapes, strides and numbers of the arguments come to
the recorded code as Size (runtime/symbolic_sizes.py), every operation of torch and every launch of
a kernel becomes a line of the record, with sizes as expressions. Views that only launches read are
an address and an offset. Names in the record:

    x3, x3_1, t3_1, n3   argument 3: the tensor, a size, a stride; or a number
    v7, p7               a tensor that the call makes, its address
    s4                   a size that follows from others
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slipstream.runtime import recorded_shapes
from slipstream.runtime.recorded_shapes import ZEROS, Address, Value, dense_stride, flat, plain
from slipstream.runtime.recording import Line, Unrecordable, pointer_of, use_recorder
from slipstream.runtime.symbolic_sizes import Size, text_of, value_of


class CallRecorder(recorded_shapes.ShapeRules, TorchFunctionMode):
    """The mode under which a call is recorded.

    Attributes:
        given: names of the arguments that are tensors.
        constants: by name, what else the record holds.
        stream, is_profiled: of the kernels' device, and whether a profiler looks at launches.
    """

    STREAM = object()  # the place of the stream in a launch's arguments

    def __init__(self, args: Sequence[Any], detach: bool = True) -> None:
        """detach: the call gets `args` of the recorder, each a tensor of its own, also where one is
        given twice."""
        super().__init__()
        self._detach = detach
        self.lines: list[Line] = []
        self.failed: str | None = None
        self.launches, self.operations, self.late_guards = 0, 0, False
        self.constants: dict[str, Any] = {}
        self._values: dict[int, Value] = {}
        self._lets: dict[str, Size] = {}
        self._guards: set[str] = set()
        self._made: dict[str, str] = {}  # names by the text of their lines
        self._memory: set[int] = set()  # addresses of memory of this call
        self._names: dict[int, str] = {}
        self._counts = dict.fromkeys("vsfcgmu", 0)
        self._open = True
        self.device: torch.device | None = None
        self.given: set[str] = set()
        self.ranks: dict[str, int] = {}
        self.stream: Callable[[], Any] | None = None
        self.is_profiled: Callable[[], bool] | None = None
        self.args = [self._argument(n, x) for n, x in enumerate(args)]

    def _argument(self, n: int, x: Any) -> Any:
        if type(x) is int:
            return Size(self, f"n{n}", x)
        if not isinstance(x, Tensor):
            return x
        x = x.detach() if self._detach else x
        shape = tuple(Size(self, f"x{n}_{d}", size) for d, size in enumerate(x.shape))
        stride = tuple(Size(self, f"t{n}_{d}", size) for d, size in enumerate(x.stride()))
        value = Value(f"x{n}", x, shape=shape, stride=stride, dense=x.is_contiguous())
        self._values[id(x)] = value
        self.given.add(value.name)
        self.ranks[value.name] = x.dim()
        self.device = self.device or x.device
        return x

    # -- what sizes write

    def let(self, text: str, value: int, late: bool) -> Size:
        known = self._lets.get(text)
        if known is None:
            name = self._next("s")
            known = self._lets[text] = Size(self, name, value, late)
            self._write(Line("let", text, name, late))
        return known

    def guard(self, text: str, late: bool) -> None:
        if text not in self._guards and self._open:
            self._guards.add(text)
            self.late_guards |= late
            self._write(Line("guard", text, late=late))

    def ask(self, policy: Callable[..., Any], args: tuple) -> Any:
        found = policy(*map(value_of, args))
        if not any(type(x) is Size for x in args):
            return found
        late = any(isinstance(x, Size) and x.late for x in args)
        text = f"{self._constant(policy)}({', '.join(map(text_of, args))})"
        name = self._next("s")
        self._write(Line("let", text, name, late))
        if type(found) is int:
            self.guard(f"{name} is not None", late)
            return Size(self, name, found, late)
        if found is None or isinstance(found, bool):
            self.guard(f"{name} is {found}", late)
            return found
        self.guard(f"{name} is not None", late)
        return type(found)(*[self._field(f"{name}[{i}]", x, late) for i, x in enumerate(found)])

    def _field(self, text: str, x: Any, late: bool) -> Any:
        if type(x) is int:
            return self.let(text, x, late)
        self.guard(f"{text} == {x!r}", late)
        return x

    def close(self) -> None:
        """Sizes that are left somewhere write no more."""
        self._open = False

    # -- what torch is asked for

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with use_recorder(None):
            return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and name in recorded_shapes.CONSTANT:
            return func(*args, **kwargs)
        question = getattr(self, f"_ask_{name}", None)
        asks = x is not None and question is not None
        out = None if asks else func(*plain(args), **plain(kwargs))
        try:
            if x is not None and question is not None:
                return question(self.value_of(x), x, *args[1:], **kwargs)
            self._operation(func, name, args, kwargs, out)
        except Unrecordable as error:
            self.failed = self.failed or str(error) or name
        return func(*args, **kwargs) if asks else out

    def _ask_shape(self, value: Value, x: Tensor) -> tuple:
        if value.shape is None:
            name = value.name
            value.shape = tuple(
                self.let(f"{name}.shape[{d}]", n, True) for d, n in enumerate(x.shape)
            )
        return value.shape

    def _ask_size(self, value: Value, x: Tensor, dim: int | None = None) -> Any:
        shape = self._ask_shape(value, x)
        return shape if dim is None else shape[dim]

    def _ask___len__(self, value: Value, x: Tensor) -> int:
        return int(self._ask_shape(value, x)[0])

    def _ask_numel(self, value: Value, x: Tensor) -> Any:
        count: Any = 1
        for n in self._ask_shape(value, x):
            count = recorded_shapes.product(count, n)
        return count

    _ask_nelement = _ask_numel

    def _ask_stride(self, value: Value, x: Tensor, dim: int | None = None) -> Any:
        if value.stride is None:
            name = value.name
            value.stride = tuple(
                self.let(f"{name}.stride({d})", n, True) for d, n in enumerate(x.stride())
            )
        return value.stride if dim is None else value.stride[dim]

    def _ask_storage_offset(self, value: Value, x: Tensor) -> Any:
        # an argument's too: it is none of the sizes that are known before the call
        return self.let(f"{value.name}.storage_offset()", int(x.storage_offset()), True)

    def _ask_is_contiguous(
        self, value: Value, x: Tensor, memory_format: Any = torch.contiguous_format
    ) -> bool:
        found = x.is_contiguous(memory_format=memory_format)
        if memory_format != torch.contiguous_format:
            self._fail("is_contiguous of a memory format")
        elif not value.dense and value.name not in self.given:  # of arguments it is in the key
            self.guard(f"{value.name}.is_contiguous() is {found}", True)
        return found

    def _ask_data_ptr(self, value: Value, x: Tensor) -> Address:
        return Address(self, value, x.data_ptr())

    def _ask_untyped_storage(self, value: Value, x: Tensor) -> Any:
        self._fail("the storage of a tensor")
        return x.untyped_storage()

    # -- operations

    def _operation(self, func: Any, name: str, args: tuple, kwargs: dict, out: Any) -> None:
        outs = [x for x in flat(out) if x is not None]
        given = [x for x in flat((args, kwargs)) if isinstance(x, Tensor)]
        if not given and not any(isinstance(x, Tensor) for x in outs):
            return  # of dtypes, such as promote_types, which every call of the key does alike
        if any(not isinstance(x, Tensor) or x.device != self.device for x in outs):
            raise Unrecordable(f"{name} gives what is no tensor of the device")
        is_plain = not kwargs.keys() & {"out", "pin_memory", "memory_format"}
        if is_plain and name in recorded_shapes.EMPTY | ZEROS and self._fresh(name, args, out):
            return
        if args and out is args[0] and self._same(name, out):
            return
        if (
            isinstance(out, Tensor)
            and name in recorded_shapes.VIEWS
            and self._view(func, name, args, kwargs, out)
        ):
            return
        if name in recorded_shapes.PARTS and outs and isinstance(args[0], Tensor):
            self._parts(func, name, args, kwargs, outs)
        else:
            self._step(func, name, args, kwargs, out, outs)

    def _same(self, name: str, x: Tensor) -> bool:
        """Whether an operation that gave back its argument did nothing."""
        # of one dimension alone, flatten gives it back for all sizes
        if name in recorded_shapes.BY_DTYPE or name == "flatten":
            return True
        if name == "contiguous":
            self._ask_is_contiguous(self.value_of(x), x)
            return True
        if name.endswith("_") or name in recorded_shapes.IN_PLACE:
            return False
        raise Unrecordable(f"{name} gives back its argument")

    def _fresh(self, name: str, args: tuple, out: Tensor) -> bool:
        like = self.value_of(args[0]) if args and isinstance(args[0], Tensor) else None
        strided = name.endswith("strided")
        if name.endswith("_like"):
            assert like is not None
            if not like.dense:
                return False
            shape = self._ask_shape(like, args[0])
        else:
            rest = args[1:] if like is not None else args
            shape = tuple(recorded_shapes.sizes_given(rest))
        stride = tuple(args[2] if like is not None else args[1]) if strided else dense_stride(shape)
        if len(shape) != out.dim():
            return False
        value = self._new(out, shape=shape, stride=stride, dense=not strided, fresh=True)
        make = torch.empty(0, dtype=out.dtype, device=out.device).new_empty_strided
        count: Any = 1
        for n in shape:
            count = recorded_shapes.product(count, n)
        text = f"{self._constant(make)}({self._tuple(shape)}, {self._tuple(stride)})"
        size = count * value.itemsize
        late = type(size) is Size and size.late
        if name in ZEROS:
            self.operations += 1
            self._write(Line("step", f"{text}.zero_()", value.name))
        else:
            self._write(
                Line("fresh", text, value.name, size=text_of(size), late_size=late or strided)
            )
        return True

    def _view(self, func: Any, name: str, args: tuple, kwargs: dict, out: Tensor) -> bool:
        x = args[0]
        base = self.value_of(x)
        if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            return False  # a copy
        found = self.place_of_view(name, base, x, args, kwargs, out)
        if found is None:
            return False
        self._write(Line("view", self._call(func, args, kwargs), self._placed(base, out, *found)))
        return True

    def _parts(self, func: Any, name: str, args: tuple, kwargs: dict, outs: list[Tensor]) -> None:
        base = self.value_of(args[0])
        places = self.places_of_parts(name, base, args[0], args, kwargs, len(outs))
        names = [self._placed(base, *x) for x in zip(outs, *zip(*places))]
        text = self._call(func, args, kwargs)
        self._write(Line("view", text, "".join(f"{x}, " for x in names)))

    def _placed(
        self, base: Value, x: Tensor, offset: Any, shape: Any, stride: Any, dense: bool
    ) -> str:
        """Names a view that begins `offset` bytes behind the base."""
        offset = recorded_shapes.total(base.offset, offset)
        fresh = base.root.fresh and type(offset) is int and offset % 16 == 0
        place = {"root": base.root, "offset": offset, "fresh": fresh}
        return self._new(x, shape=shape, stride=stride, dense=dense, **place).name

    def _step(
        self, func: Any, name: str, args: tuple, kwargs: dict, out: Any, outs: list[Tensor]
    ) -> None:
        text = self._call(func, args, kwargs)
        views = bool(outs) and all(x._is_view() and self._lookup(x) is None for x in outs)
        self.operations += not views
        names = []
        for x in outs:
            known = self._lookup(x)
            if known is not None:  # in place
                names.append("_")
                continue
            shape, dense = self.shape_of_step(name, args, kwargs, x)
            stride = dense_stride(shape) if dense and shape is not None else None
            names.append(self._new(x, shape=shape, stride=stride, dense=dense).name)
        left = names[0] if isinstance(out, Tensor) else "".join(f"{x}, " for x in names)
        self._write(Line("view" if views else "step", text, "" if {*names} <= {"_"} else left))

    def decision(self, result: Any) -> tuple[Any, str]:
        """A result that is no tensor, and its text. The record holds for the sizes in it alone."""

        def pinned(x: Any) -> Any:
            if isinstance(x, tuple):
                made = [*map(pinned, x)]
                return type(x)(made) if type(x) is tuple else type(x)(*made)
            return self.pinned(x)

        result = pinned(result)
        return result, self._constant(result)

    def result(self, result: Any) -> str:
        """The text of what the call returns. Views of memory of its own come as tensors that may be
        changed in place, as custom_op.py has them.

        Raises:
            Unrecordable: it is no tensor of the call.
        """
        if result is None or isinstance(result, Tensor):
            return self._result(result)
        if type(result) not in (tuple, list):
            raise Unrecordable(f"a call gives {type(result).__name__}")
        inside = "".join(f"{self._result(x)}, " for x in result)
        return f"[{inside}]" if type(result) is list else f"({inside})"

    def _result(self, x: Any) -> str:
        if not isinstance(x, Tensor):
            return self._text(x)
        name, memory = self.value_of(x).name, x.untyped_storage()._cdata
        given = (y for y in self.args if isinstance(y, Tensor))
        own = not any(y.untyped_storage()._cdata == memory for y in given)
        return f"{name}.data" if own and x._is_view() else name

    # -- launches

    def pinned(self, x: Any) -> Any:
        """A number for whose value alone the record holds."""
        return int(x) if type(x) is Size else x

    def plain(self, x: Any) -> Any:
        """Arguments of a launch, with this call's sizes; a descriptor is made again."""
        return tuple(map(recorded_shapes.concrete, x))

    def launched(
        self, run: Callable[..., Any] | None, args: Sequence[Any], maps: Sequence[Any] = ()
    ) -> None:
        """A launch that has been made, as run(*args) with addresses for tensors; None if it cannot
        be made so again. maps: for each descriptor among the args, those of its kind."""
        self.launches += 1
        try:
            if run is None:
                raise Unrecordable("a launch")
            with torch._C.DisableTorchFunction():
                self._launch(run, args, maps)
        except Unrecordable as error:
            self._fail(str(error))

    def _launch(self, run: Callable[..., Any], args: Sequence[Any], maps: Sequence[Any]) -> None:
        left, texts = iter(maps), []
        for x in args:
            if isinstance(x, Tensor):
                texts.append(self._pointer(self.value_of(x)))
            elif hasattr(x, "base") and hasattr(x, "block_shape"):
                texts.append(self._map(x, next(left)))
                texts += [*map(text_of, x.shape), *map(text_of, x.strides)]
            else:
                texts.append("stream" if x is self.STREAM else self._text(x))
        self._write(Line("launch", f"{self._constant(run)}({', '.join(texts)})"))

    def _map(self, x: Any, make: Any) -> str:
        """The name of a descriptor for TMA, which launches of a call share."""
        place = self._pointer(self.value_of(x.base))
        given = f"{place}, {self._tuple(x.shape)}, {self._tuple(x.strides)}"
        made, known = self._constant(make), self._constant(make.known)
        return self._once("map", f"{known}.get(({given})) or {made}({given})", "m", True)

    def _tuple(self, sizes: Sequence[Any]) -> str:
        """A tuple of sizes, which is made with the sizes where all of them are known early."""
        text, late = (
            recorded_shapes.tuple_text(sizes),
            any(type(x) is Size and x.late for x in sizes),
        )
        if late or not any(type(x) is Size for x in sizes):
            return text
        return self._once("let", text, "u", False)

    def _once(self, kind: str, text: str, letter: str, late: bool) -> str:
        """The name of what a line makes, the same for the same line."""
        name = self._made.get(text)
        if name is None:
            name = self._made[text] = self._next(letter)
            self._write(Line(kind, text, name, late))
        return name

    def _pointer(self, value: Value) -> str:
        place, offset = pointer_of(value.root.name), value.offset
        if type(offset) is int:
            return f"{place} + {offset}" if offset else place
        self.guard(f"{offset.text} % 16 == {offset.value % 16}", offset.late)
        return f"{place} + {offset.text}"

    # -- names

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why

    def _lookup(self, x: Tensor) -> Value | None:
        known = self._values.get(id(x))
        return known if known is not None and known.ref() is x else None

    def value_of(self, x: Tensor) -> Value:
        known = self._lookup(x)
        if known is not None:
            return known
        if type(x) is torch.nn.Parameter or x.untyped_storage().data_ptr() in self._memory:
            raise Unrecordable("a tensor that is no argument, or that was not seen to be made")
        name = self._next("c")
        value = Value(
            name, x, shape=tuple(x.shape), stride=tuple(x.stride()), dense=x.is_contiguous()
        )
        self._values[id(x)] = value
        self.constants[name] = x
        return value

    def _new(self, x: Tensor, **more: Any) -> Value:
        value = Value(self._next("v"), x, **more)
        value.expect_sizes(x)
        self._values[id(x)] = value
        if value.root is value:
            self._memory.add(x.untyped_storage().data_ptr())
        return value

    def _next(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind}{self._counts[kind]}"

    def _constant(self, x: Any) -> str:
        name = self._names.get(id(x))
        if name is None:
            name = self._names[id(x)] = self._next("f")
            self.constants[name] = x
        return name

    def _write(self, line: Line) -> None:
        if self._open:
            self.lines.append(line)

    def _call(self, func: Any, args: tuple, kwargs: Mapping[str, Any]) -> str:
        named = [f"{name}={self._text(x)}" for name, x in kwargs.items()]
        return f"{self._constant(func)}({', '.join([*map(self._text, args), *named])})"

    def _text(self, x: Any) -> str:
        if isinstance(x, Tensor):
            return self.value_of(x).name
        if type(x) is Size:
            return x.text
        if x is None or x is Ellipsis or type(x) in (bool, int, str):
            return repr(x)
        if type(x) in (tuple, list):
            inside = ", ".join(map(self._text, x))
            return f"[{inside}]" if type(x) is list else f"({inside}{',' if len(x) == 1 else ''})"
        if type(x) is slice:
            return f"slice({self._text(x.start)}, {self._text(x.stop)}, {self._text(x.step)})"
        if isinstance(x, Address):
            raise Unrecordable("an address is used as a number")
        return self._constant(x)
