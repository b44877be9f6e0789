"""Triton's interpreter made quicker: the same numbers in a fraction of the time, and NaN as GPUs
have it. Most of its time goes to what does not depend on the data: types made and compared for each
value, combine functions called for each element."""

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.by_shape import product

# dtypes whose sums and products numpy has as they are
INTEGERS = (np.int32, np.int64)
ARITHMETIC = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}


def install() -> None:
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    core: Any = importlib.import_module("triton.language.core")
    semantic: Any = importlib.import_module("triton.language.semantic")
    _patch_language_once(interpreter)
    _remember_block_types(core)
    _remember_shapes(core)
    _remember_numpy_types(interpreter, core)
    _remember_promotions(semantic.TritonSemantic)
    _broadcast_at_once(interpreter, core, semantic.TritonSemantic)
    _call_at_once(interpreter)
    _compare_by_name(core)
    _unwrap_at_once(core)
    _make_handles_at_once(interpreter)
    # made by seven operations for each of integers, and read in Triton's debug mode alone
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = lambda *args: None
    _combine_slices(interpreter)
    _drop_nan(interpreter)
    _round_once(interpreter)
    # of whose functions the product alone depends on the processor
    interpreter.np = SimpleNamespace(**{**vars(np), "matmul": product, "expand_dims": _expanded})


def _expanded(x: np.ndarray, axis: int) -> np.ndarray:
    return x[(slice(None),) * (axis % (x.ndim + 1)) + (None,)]


def _round_once(interpreter: Any) -> None:
    """tl.fma, of which the interpreter rounds the product and the sum."""

    def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        wide = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
        return wide.astype(x.dtype)

    interpreter.InterpreterBuilder.create_fma = lambda self, x, y, z: self.ternary_op(
        x, y, z, fused
    )


def _drop_nan(interpreter: Any) -> None:
    """As a GPU has them: of a NaN and a number tl.maximum, tl.minimum and tl.clamp give the number.
    A NaN's bits are 0x7fffffff, which integer arithmetic may turn into those of a number."""

    def clamped(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return np.fmin(np.fmax(x, low), high)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        keep = propagate_nan == interpreter.tl.PropagateNan.ALL
        return self.ternary_op(x, low, high, np.clip if keep else clamped)

    def bitcast(self: Any, x: Any, dtype: Any) -> Any:
        data = x.data
        if data.dtype == np.float32:
            data = np.where(np.isnan(data), np.int32(0x7FFFFFFF).view(np.float32), data)
        return cast(self, interpreter.TensorHandle(data, x.dtype), dtype)

    builder = interpreter.InterpreterBuilder
    cast = builder.create_bitcast
    builder.create_bitcast = bitcast
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_clampf = clamp


def _patch_language_once(interpreter: Any) -> None:
    """It replaces the functions of triton.language for every call of a device function: here once a
    module in each launch, which restores them at its end."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch(fn)

    def launch_patched(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(self, *args, **options)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_patched


def _remember_block_types(core: Any) -> None:
    """Each value has a type of its own, whose shape Triton checks anew."""
    make, with_element = core.block_type.__init__, core.block_type.with_element_ty
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    others: dict[Any, Any] = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (*(getattr(x, "value", x) for x in getattr(shape, "values", shape)),)
        if type(element_ty) is not core.dtype:  # pointers are not told apart by their names
            make(self, element_ty, shape)
            self.sizes = sizes
            return
        key = element_ty.name, sizes
        if key not in known:
            make(self, element_ty, shape)
            self.shape, self.sizes = shapes.setdefault(sizes, self.shape), sizes
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    def other(self: Any, element_ty: Any) -> Any:
        if type(element_ty) is not core.dtype or type(self.element_ty) is not core.dtype:
            return with_element(self, element_ty)
        key = self.name, element_ty.name
        if key not in others:
            others[key] = with_element(self, element_ty)
        return others[key]

    core.block_type.__init__ = remembered
    core.block_type.with_element_ty = other


def _remember_shapes(core: Any) -> None:
    """Remembers shapes of tensors, whose sizes are constants, unlike those of their types."""
    make, known = core.tensor.__init__, {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        # the type's name has the sizes
        if type.name not in known:
            make(self, handle, type)
            known[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[type.name]

    core.tensor.__init__ = remembered


def _remember_numpy_types(interpreter: Any, core: Any) -> None:
    find, known = interpreter._get_np_dtype, {}

    def remembered(dtype: Any) -> Any:
        element = dtype.element_ty if type(dtype) is core.block_type else dtype
        if type(element) is not core.dtype:
            return find(dtype)
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    interpreter._get_np_dtype = remembered


def _remember_promotions(semantic: Any) -> None:
    find, known = semantic.computation_type_impl, {}

    def remembered(
        self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div: bool
    ) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div
        if key not in known:
            known[key] = find(self, a, a_is_scalar, b, b_is_scalar, div)
        return known[key]

    semantic.computation_type_impl = remembered


def _common_sizes(a: Any, b: Any) -> Any:
    """The sizes of both, or None: other numbers of dimensions, or none that fit."""
    if not a.type.is_block():
        return b.type.sizes if b.type.is_block() else None
    if not b.type.is_block():
        return a.type.sizes
    x, y = a.type.sizes, b.type.sizes
    if x == y:
        return x
    if len(x) != len(y) or any(m != n and 1 not in (m, n) for m, n in zip(x, y)):
        return None
    return tuple(map(max, x, y))


def _broadcast_at_once(interpreter: Any, core: Any, semantic: Any) -> None:
    """It compares shapes as tuples of its own, several times for each operation."""
    broadcast, check = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    numbers: dict[Any, Any] = {}
    types: dict[Any, Any] = {}

    def block(dtype: Any, sizes: tuple[int, ...]) -> Any:
        if type(dtype) is not core.dtype:
            return core.block_type(dtype, list(sizes))
        key = dtype.name, sizes
        if key not in types:
            types[key] = core.block_type(dtype, list(sizes))
        return types[key]

    def typed(x: Any, sizes: tuple[int, ...]) -> Any:
        """Of that type; numpy broadcasts the data of elementwise operations by itself."""
        if x.type.is_block() and x.type.sizes == sizes:
            return x
        return core.tensor(x.handle, block(x.dtype, sizes))

    def wide(x: Any, sizes: tuple[int, ...]) -> Any:
        if x.handle.data.shape == sizes:
            return typed(x, sizes)
        handle = interpreter.TensorHandle(np.broadcast_to(x.handle.data, sizes), x.handle.dtype)
        return core.tensor(handle, block(x.dtype, sizes))

    def quick(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
        sizes = _common_sizes(a, b)
        if sizes is None:
            return broadcast(self, a, b)  # which adds dimensions, or refuses
        return wide(a, sizes), wide(b, sizes)

    def beside(self: Any, number: Any, x: Any) -> Any:
        """The number in the dtype that both have, None if the tensor's would be another."""
        key = number, type(number), x.dtype.name
        if key not in numbers:
            like = core.tensor(x.handle, x.dtype)
            found, other = check(self, number, like)
            numbers[key] = found if other is like else None
        return numbers[key]

    def operands(
        self: Any,
        a: Any,
        b: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        x, y = a, b
        if not div_or_mod and arithmetic_check:
            if type(a) in (int, float) and type(b) is core.tensor and type(b.dtype) is core.dtype:
                x = beside(self, a, b)
            elif type(b) in (int, float) and type(a) is core.tensor and type(a.dtype) is core.dtype:
                y = beside(self, b, a)
            if type(x) is core.tensor and type(y) is core.tensor:
                pointer = allow_lhs_ptr and x.dtype.is_ptr() and y.dtype.is_int()
                alike = type(x.dtype) is core.dtype and x.dtype.name == y.dtype.name
                if (pointer or alike) and (sizes := _common_sizes(x, y)) is not None:
                    return typed(x, sizes), typed(y, sizes)
        return check(self, a, b, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def at_once(name: str, operation: Any) -> None:
        """Sums and products whose operands are in dtypes of ARITHMETIC, and places in memory."""
        plain = getattr(semantic, name)

        def computed(self: Any, a: Any, b: Any, *more: Any, **named: Any) -> Any:
            x, y = a, b
            if type(a) in (int, float) and type(b) is core.tensor and b.dtype.name in ARITHMETIC:
                x = beside(self, a, b)
            elif type(b) in (int, float) and type(a) is core.tensor and a.dtype.name in ARITHMETIC:
                y = beside(self, b, a)
            if type(x) is not core.tensor or type(y) is not core.tensor:
                return plain(self, a, b, *more, **named)
            dtype, of_numpy = x.dtype, ARITHMETIC.get(y.dtype.name)
            place = name == "add" and of_numpy in INTEGERS and dtype.is_ptr()
            if not place:
                if of_numpy is None or dtype.name not in ARITHMETIC:
                    return plain(self, a, b, *more, **named)
                if dtype.name != y.dtype.name:
                    if of_numpy not in INTEGERS or ARITHMETIC[dtype.name] not in INTEGERS:
                        return plain(self, a, b, *more, **named)
                    dtype, of_numpy = core.int64, np.int64
            if not (x.type.is_block() or y.type.is_block()):
                kind = dtype
            elif (sizes := _common_sizes(x, y)) is None:
                return plain(self, a, b, *more, **named)
            else:
                kind = x.type if x.type.name == y.type.name else block(dtype, sizes)
            if place:
                return core.tensor(self.builder.create_addptr(x.handle, y.handle), kind)
            data = operation(x.handle.data, y.handle.data, dtype=of_numpy)
            return core.tensor(interpreter.TensorHandle(data, dtype), kind)

        setattr(semantic, name, computed)

    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = quick, operands
    for name, operation in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        at_once(name, operation)


def _call_at_once(interpreter: Any) -> None:
    """Functions of the language go through two others, which look for what is passed here; they are
    looked for, and made, in each launch."""
    builder = interpreter.interpreter_builder
    semantic, known = interpreter.TritonSemantic(builder), {}

    def made(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        return call

    def patch(package: Any, given: Any, scope: Any) -> None:
        assert given is builder
        if package not in known:
            found = inspect.getmembers(package, interpreter.tl.core.is_builtin)
            known[package] = [(name, made(x)) for name, x in found]
        for name, call in known[package]:
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch


def _compare_by_name(core: Any) -> None:
    """Types, without a look for constants in what is none."""
    equal = core.dtype.__eq__

    def quick(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    core.dtype.__eq__ = quick


def _unwrap_at_once(core: Any) -> None:
    """Most values are no constants, nor lists or tuples that may have some."""
    unwrap, others = core._unwrap_if_constexpr, (core.tensor, int, float, bool, type(None))

    def quick(value: Any) -> Any:
        return value if type(value) in others else unwrap(value)

    core._unwrap_if_constexpr = quick


def _make_handles_at_once(interpreter: Any) -> None:
    """Without a look at how wide their data is."""

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = make


def _combine_slices(interpreter: Any) -> None:
    """Reductions and scans by a function of elements, which it calls for each: here for each slice
    along the axis, in the same order."""

    def combined(self: Any, values: Any, axis: int) -> list[list[np.ndarray]]:
        """For each value its results at each step along the axis."""
        dtypes = [x.dtype for x in values]
        slices = [np.moveaxis(x.handle.data, axis, 0) for x in values]
        total = [x[0] for x in slices]
        steps = [total]
        for i in range(1, len(slices[0])):
            given = [*total, *(x[i] for x in slices)]
            tensors = [self.to_tensor(x, dtype) for x, dtype in zip(given, 2 * dtypes)]
            found = self.combine_fn.fn(*tensors)
            found = found if isinstance(found, tuple) else (found,)
            total = [
                np.broadcast_to(getattr(getattr(x, "handle", None), "data", x), old.shape or 1)
                .astype(old.dtype)
                .reshape(old.shape)
                for x, old in zip(found, total, strict=True)
            ]
            steps.append(total)
        return [list(x) for x in zip(*steps)]

    def reduce(self: Any, values: Any) -> list[Any]:
        axis = self.axis
        found = []
        flat, at = self.unravel(values, axis)
        for x, steps in zip(flat, combined(self, flat, at)):
            data = steps[-1]
            if self.keep_dims and axis is not None:
                data = np.expand_dims(data, at)
            elif self.keep_dims:
                data = np.reshape(data, (1,) * len(values[0].handle.data.shape))
            found.append(self.to_tensor(data, x.dtype))
        return found

    def scan(self: Any, values: Any) -> list[Any]:
        every = combined(self, values, self.axis)
        return [self.to_tensor(np.stack(x, self.axis), v.dtype) for v, x in zip(values, every)]

    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan
