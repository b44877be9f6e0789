"""Effects of torch's views and operations on shapes, for records of calls (call_recorder.py).

The rules are in sizes, which hold for others than those of the recorded call. Where a rule is
missing, a record reads the shape of the tensor itself."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.runtime.recording import Unrecordable
from slipstream.runtime.symbolic_sizes import Size, text_of, value_of

# Questions about a tensor whose answer is the same for all sizes.
_CONSTANT_NAMES = """
dtype device is_cuda is_cpu is_meta ndim dim ndimension element_size itemsize is_neg is_conj layout
is_floating_point is_complex requires_grad get_device _is_view is_sparse is_quantized is_leaf
grad_fn _version is_inference type names has_names
"""
CONSTANT = frozenset(_CONSTANT_NAMES.split())
EMPTY = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))
ZEROS = frozenset(("zeros", "new_zeros", "zeros_like"))

# Operations that return a view which begins where their argument does.
_SAME_PLACE_NAMES = """
view reshape unsqueeze transpose t T mT permute flatten unflatten detach swapaxes view_as expand
squeeze movedim
"""
SAME_PLACE = frozenset(_SAME_PLACE_NAMES.split())
VIEWS = SAME_PLACE | {"narrow", "select", "__getitem__"}
# Operations that return several views, of parts along a dimension.
PARTS = frozenset(("split", "split_with_sizes", "chunk", "unbind"))
# Operations that give back their argument where it has the dtype that is wanted.
BY_DTYPE = frozenset(("to", "float", "half", "bfloat16", "double", "type_as"))
# Besides those with an underscore: x *= y is named as x * y is.
IN_PLACE = frozenset(("mul", "add", "sub", "div", "wait_tensor"))
_ELEMENTWISE_NAMES = """
contiguous clone add sub mul div neg exp exp2 log flip cumsum sigmoid softplus clamp pow rsub
silu tanh relu cos sin reciprocal rsqrt masked_fill __mul__ __add__ __sub__ __neg__ __rmul__
__radd__ __rsub__ __truediv__ __rtruediv__ __pow__ __rpow__ addcmul
"""
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_PERMUTATIONS = frozenset(("t", "T", "mT", "transpose", "swapaxes", "permute", "movedim"))
_OTHER_SHAPES = frozenset(("view", "view_as", "reshape", "unflatten", "flatten"))


class Value:
    """A tensor of the record, at `offset` bytes from the address of `root`.

    Attributes:
        shape, stride: None where only the tensor itself knows.
        dense: contiguous for all sizes of the record.
    """

    def __init__(
        self,
        name: str,
        x: Tensor,
        *,
        root: "Value | None" = None,
        offset: Any = 0,
        shape: tuple | None = None,
        stride: tuple | None = None,
        dense: bool = False,
        fresh: bool = False,
    ) -> None:
        self.name, self.ref, self.itemsize = name, weakref.ref(x), x.element_size()
        self.root, self.offset = root or self, offset
        self.shape, self.stride, self.dense, self.fresh = shape, stride, dense, fresh

    def expect_sizes(self, x: Tensor) -> None:
        """Compares what the rules say with a tensor that torch has made by them."""
        pairs = [(self.shape, x.shape), (self.stride, x.stride())]
        for rule, found in pairs if x.numel() else pairs[:1]:  # torch has other strides of nothing
            if rule is not None and (*map(value_of, rule),) != (*found,):
                raise Unrecordable(f"a tensor of {(*found,)} that was to be of {rule}")


class Address:
    """Result of data_ptr: it may be compared, and asked whether it is a multiple."""

    def __init__(self, recorder: "ShapeRules", value: "Value", address: int) -> None:
        self._recorder, self._value, self._address = recorder, value, address

    def _known(self, text: str, found: Any) -> Any:
        name = self._value.name
        self._recorder.guard(text.format(f"{name}.data_ptr()") + f" == {found!r}", True)
        return found

    def __mod__(self, n: int) -> int:
        found = self._address % n
        value = self._value
        if 16 % n == 0 and (value.fresh or value.name in self._recorder.given):
            return found  # of arguments it is in the key
        return self._known(f"{{}} % {n}", found)

    def __and__(self, n: int) -> int:
        return self % (n + 1) if n in (1, 3, 7, 15) else self._refuse()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Address):
            self._refuse()
        assert isinstance(other, Address)
        name = other._value.name
        found = self._address == other._address
        return self._known(f"({{}} == {name}.data_ptr())", found)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _refuse(self, *_: Any) -> Any:
        raise Unrecordable("an address is used as a number")

    __hash__ = __index__ = __int__ = __add__ = __sub__ = __lt__ = _refuse


class ShapeRules(ABC):
    """The rules; a recorder answers what they ask of a value.

    Attributes:
        given: names of the arguments that are tensors.
    """

    given: set[str]

    @abstractmethod
    def guard(self, text: str, late: bool) -> None: ...

    @abstractmethod
    def value_of(self, x: Tensor) -> Value: ...

    @abstractmethod
    def _ask_shape(self, value: Value, x: Tensor) -> tuple: ...

    @abstractmethod
    def _ask_stride(self, value: Value, x: Tensor, dim: int | None = None) -> Any: ...

    @abstractmethod
    def _ask_numel(self, value: Value, x: Tensor) -> Any: ...

    def guard_number(self, x: Any, specialized: bool) -> None:
        """Guards what Triton looks at in a number of a launch: its width and, if it specializes
        for, whether it is 1 or a multiple of 16."""
        if type(x) is not Size:
            return
        self.guard(f"-2147483648 <= {x.text} <= 2147483647", x.late)
        if not specialized:
            return
        if x.value == 1 or x.value % 16 == 0:
            self.guard(f"{x.text} == 1" if x.value == 1 else f"{x.text} % 16 == 0", x.late)
        else:
            self.guard(f"{x.text} % 16 != 0 and {x.text} != 1", x.late)

    def place_of_view(
        self, name: str, base: Value, x: Tensor, args: tuple, kwargs: dict, out: Tensor
    ) -> tuple[Any, tuple | None, tuple | None, bool] | None:
        """The offset in bytes from the base, shape, strides, and whether it is contiguous."""
        if name in SAME_PLACE:
            # a copy, where strides want one at other sizes, would be elsewhere
            if name in ("reshape", "flatten", "unflatten") and not base.dense:
                return None
            return 0, *self._shape_of_view(name, base, x, args, kwargs, out)
        stride = self._ask_stride(base, x)
        shape = list(self._ask_shape(base, x))
        if name == "select" and len(args) == 3 and not kwargs:
            index: Any = [slice(None)] * (args[1] % x.dim()) + [args[2]]
        elif name == "narrow" and len(args) == 4 and not kwargs:
            dim, start, length = args[1] % x.dim(), args[2], args[3]
            if not start >= 0:
                return None
            shape[dim] = length
            return product(product(start, stride[dim]), base.itemsize), tuple(shape), stride, False
        elif name == "__getitem__":
            index = list(args[1]) if isinstance(args[1], tuple) else [args[1]]
        else:
            return None
        return self._place_of_index(index, base, shape, stride)

    def places_of_parts(
        self, name: str, base: Value, x: Tensor, args: tuple, kwargs: dict, count: int
    ) -> list[tuple[Any, tuple, tuple, bool]]:
        """Lists what place_of_view says of each part; count: how many there are."""
        stride, shape = self._ask_stride(base, x), self._ask_shape(base, x)
        given = [*args[1:], *(y for n, y in kwargs.items() if n != "dim")]
        sizes: Any = None if name == "unbind" else given.pop(0)
        dim = kwargs.get("dim", given[0] if given else 0) % x.dim()
        size = shape[dim]
        if name == "unbind":
            sizes = [1] * count
        elif not isinstance(sizes, tuple | list):
            step = -(-size // sizes) if name == "chunk" else sizes
            sizes = [step] * (count - 1) + [size - step * (count - 1)]
            self.guard(f"0 < {text_of(sizes[-1])} <= {text_of(step)}", _is_late(step, size))
        if total_of(sizes) != size:
            raise Unrecordable(f"{name} into other sizes")
        found, offset = [], 0
        for n in sizes:
            of_part = [*shape[:dim], *([] if name == "unbind" else [n]), *shape[dim + 1 :]]
            strides = [x for d, x in enumerate(stride) if d != dim or name != "unbind"]
            place = product(product(offset, stride[dim]), base.itemsize)
            found.append((place, tuple(of_part), tuple(strides), False))
            offset = total(offset, n)
        return found

    def _place_of_index(
        self, index: list, base: Value, shape: list, stride: tuple
    ) -> tuple[Any, tuple, tuple, bool] | None:
        if Ellipsis in [x for x in index if not isinstance(x, Tensor | Size)]:
            at = next(i for i, x in enumerate(index) if x is Ellipsis)
            given = sum(x is not None for x in index) - 1
            index[at : at + 1] = [slice(None)] * (len(shape) - given)
        offset: Any = 0
        sizes, strides, dim = [], [], 0
        for x in index:
            if x is None:
                sizes.append(1)
                strides.append(_stride_of_one(shape, stride, dim))
                continue
            if type(x) is int and x >= 0:
                offset = total(offset, product(product(x, stride[dim]), base.itemsize))
            elif type(x) is Size:
                if not 0 <= x < shape[dim]:
                    return None
                offset = total(offset, product(product(x, stride[dim]), base.itemsize))
            elif isinstance(x, slice) and x.step is None and _is_forward(x.start, x.stop):
                start = 0 if x.start is None else x.start
                stop = shape[dim] if x.stop is None else x.stop
                if not 0 <= start <= stop <= shape[dim]:
                    return None
                offset = total(offset, product(product(start, stride[dim]), base.itemsize))
                sizes.append(stop if type(start) is int and start == 0 else stop - start)
                strides.append(stride[dim])
            else:
                return None
            dim += 1
        dense = base.dense and len(sizes) == 0  # of rows alone
        return offset, (*sizes, *shape[dim:]), (*strides, *stride[dim:]), dense

    def _shape_of_view(
        self, name: str, base: Value, x: Tensor, args: tuple, kwargs: dict, out: Tensor
    ) -> tuple[tuple | None, tuple | None, bool]:
        """Shape, strides, and whether it is contiguous for all sizes."""
        unknown = None, None, base.dense and name in ("flatten", "unsqueeze", "unflatten", "view")
        if kwargs or base.shape is None or base.stride is None:
            return unknown
        shape, stride = [*base.shape], [*base.stride]
        if name in _OTHER_SHAPES and base.dense:
            sizes = self._viewed(name, base, x, args)
            return unknown if sizes is None else (sizes, dense_stride(sizes), True)
        if name in _PERMUTATIONS:
            order = _order(name, x.dim(), args[1:])
            turned = tuple(shape[d] for d in order), tuple(stride[d] for d in order)
            return *turned, base.dense and order == sorted(order)
        if name == "unsqueeze":
            dim = args[1] % out.dim()
            stride.insert(dim, _stride_of_one(shape, stride, dim))
            shape.insert(dim, 1)
            return tuple(shape), tuple(stride), base.dense
        if name == "expand":
            return self._expanded(shape, stride, sizes_given(args[1:])) or unknown
        return (base.shape, base.stride, base.dense) if name == "detach" else unknown

    def _expanded(
        self, shape: list, stride: list, sizes: Sequence[Any]
    ) -> tuple[tuple, tuple, bool] | None:
        new = len(sizes) - len(shape)
        found: list[Any] = []
        strides: list[Any] = []
        for d in range(len(sizes) - 1, -1, -1):
            n, size = sizes[d], 1 if d < new else shape[d - new]
            step = _stride_of_one(found, strides, 0) if d < new else stride[d - new]
            if type(n) is int and n == -1:
                n = size
            elif type(size) is int and size == 1:
                # torch leaves the stride where this call's size is 1
                if type(n) is Size and value_of(n) == 1 and not _alike([step], [0]):
                    return None
                step = step if type(n) is int and n == 1 else 0
            elif size != n:
                return None
            found.insert(0, n)
            strides.insert(0, step)
        return tuple(found), tuple(strides), False

    def _viewed(self, name: str, base: Value, x: Tensor, args: tuple) -> tuple | None:
        """The shape of a view of a contiguous tensor."""
        assert base.shape is not None
        if name == "view_as":
            return tuple(self._ask_shape(self.value_of(args[1]), args[1]))
        if name in ("view", "reshape"):
            return _with_rest(sizes_given(args[1:]), self._ask_numel(base, x))
        if name == "unflatten":
            dim = args[1] % x.dim()
            inside = _with_rest(args[2], base.shape[dim])
            return None if inside is None else (*base.shape[:dim], *inside, *base.shape[dim + 1 :])
        first = args[1] % x.dim() if len(args) > 1 else 0
        last = args[2] % x.dim() if len(args) > 2 else x.dim() - 1
        if x.dim() == 0:
            return None
        count: Any = 1
        for n in base.shape[first : last + 1]:
            count = product(count, n)
        return (*base.shape[:first], count, *base.shape[last + 1 :])

    def shape_of_step(
        self, name: str, args: tuple, kwargs: dict, out: Tensor
    ) -> tuple[tuple | None, bool]:
        """The shape, None if that is not known, and whether it is contiguous for all sizes."""
        given = [self.value_of(x) for x in flat((args, kwargs)) if isinstance(x, Tensor)]
        if name in ("linear", "matmul", "cat") and all(x.shape is not None for x in given):
            if name == "cat":
                return _joined(given, args, kwargs)
            return _shape_of_product(given[0], given[1], name == "linear")
        if name in ("full", "ones", "arange") and "size" not in kwargs:
            sizes = tuple(sizes_given(args[:1] if name == "full" else args))
            if len(sizes) == out.dim():
                return sizes, True
            varying = any(type(x) is Size for x in flat((args, kwargs)))
            return (None, False) if varying else (tuple(out.shape), True)
        if not given or given[0].shape is None:
            return None, False
        first = given[0].shape
        if name in _ELEMENTWISE and (shape := _broadcast(given)) is not None:
            return shape, given[0].dense and _alike(first, shape)
        if name in BY_DTYPE | _ELEMENTWISE and all(_alike(x.shape, first) for x in given):
            copied = name == "contiguous" or kwargs.get("memory_format") == torch.contiguous_format
            return first, all(x.dense for x in given) or copied
        if name in _OTHER_SHAPES and not kwargs:
            return self._viewed(name, given[0], args[0], args), False
        if name == "repeat_interleave" and len(args) == 2 and type(args[1]) is int and kwargs:
            dim = kwargs["dim"] % len(first)
            return (*first[:dim], product(args[1], first[dim]), *first[dim + 1 :]), True
        if name in ("sum", "any", "all", "amax") and given[0].dense and len(args) < 3:
            if kwargs.keys() - {"dim", "dtype"}:
                return None, False
            dims: Any = args[1] if len(args) > 1 else kwargs.get("dim")
            if isinstance(dims, int | tuple | list):
                out_of = {d % len(first) for d in ([dims] if isinstance(dims, int) else dims)}
                return tuple(n for d, n in enumerate(first) if d not in out_of), True
        return None, False


def _order(name: str, rank: int, args: tuple) -> list[int]:
    """The dimensions of a permuted tensor in the places where they are then."""
    turned = getattr(torch.empty(*range(1, rank + 1), device="meta"), name)
    turned = turned if isinstance(turned, Tensor) else turned(*plain(args))
    return [n - 1 for n in turned.shape]


def _shape_of_product(x: Value, weight: Value, turned: bool) -> tuple[tuple | None, bool]:
    assert x.shape is not None and weight.shape is not None
    if len(weight.shape) != 2 or len(x.shape) < 2:
        return None, False
    return (*x.shape[:-1], weight.shape[0 if turned else 1]), x.dense


def _joined(given: Sequence[Value], args: tuple, kwargs: dict) -> tuple[tuple | None, bool]:
    """The shape of cat."""
    shapes = [x.shape or () for x in given]
    first = shapes[0]
    if {*map(len, shapes)} != {len(first)}:
        return None, False
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(first)
    if not all(
        _alike((*x[:dim], *x[dim + 1 :]), (*first[:dim], *first[dim + 1 :])) for x in shapes
    ):
        return None, False
    size = total_of([x[dim] for x in shapes])
    return (*first[:dim], size, *first[dim + 1 :]), all(x.dense for x in given)


def _broadcast(given: Sequence[Value]) -> tuple | None:
    """The common shape, where tensors' are not alike and it is the same for all sizes."""
    shapes = [x.shape for x in given]
    if any(x is None for x in shapes) or all(_alike(x, shapes[0] or ()) for x in shapes):
        return None
    found: list[Any] = []
    for d in range(1, max(len(x or ()) for x in shapes) + 1):
        sizes = [x[-d] for x in shapes if x is not None and len(x) >= d]
        wide = [n for n in sizes if not (type(n) is int and n == 1)] or [1]
        # torch has found them equal, unless one of them may be another than 1 next time
        if not _alike(wide, wide[:1] * len(wide)) and (
            any(value_of(n) == 1 for n in wide) or any(n != wide[0] for n in wide[1:])
        ):
            return None
        found.insert(0, wide[0])
    return tuple(found)


def product(x: Any, y: Any) -> Any:
    """x y, without a line for what is 0 or 1."""
    for one, other in ((x, y), (y, x)):
        if type(one) is int and one < 2:
            return other if one == 1 else 0 if one == 0 else one * other
    return x * y


def total(x: Any, y: Any) -> Any:
    for zero, other in ((x, y), (y, x)):
        if type(zero) is int and zero == 0:
            return other
    return x + y


def total_of(sizes: Sequence[Any]) -> Any:
    found: Any = 0
    for n in sizes:
        found = total(found, n)
    return found


def _is_late(*sizes: Any) -> bool:
    return any(type(x) is Size and x.late for x in sizes)


def _stride_of_one(shape: Sequence[Any], stride: Sequence[Any], dim: int) -> Any:
    """The stride that torch gives a new dimension of one before `dim`."""
    return product(shape[dim], stride[dim]) if dim < len(shape) else 1


def _with_rest(view: Sequence[Any], count: Any) -> tuple | None:
    """Sizes of a view of `count` elements, of which one may be -1."""
    sizes = [*view]
    if any(isinstance(n, torch.dtype) for n in sizes):
        return None
    for i, n in enumerate(sizes):
        if type(n) is int and n == -1:
            rest: Any = 1
            for m in (*sizes[:i], *sizes[i + 1 :]):
                rest = product(rest, m)
            sizes[i] = count // rest
    return tuple(sizes)


def _is_forward(*ends: Any) -> bool:
    return all(x is None or type(x) is Size or (type(x) is int and x >= 0) for x in ends)


def sizes_given(args: tuple) -> Sequence[Any]:
    """Sizes that are given one by one or as a sequence."""
    return args[0] if args and isinstance(args[0], tuple | list) else args


def _alike(shape: Sequence[Any] | None, other: Sequence[Any]) -> bool:
    """Whether two shapes are the same for all sizes."""
    return shape is not None and [*map(text_of, shape)] == [*map(text_of, other)]


def dense_stride(shape: Sequence[Any]) -> tuple:
    """The strides of a contiguous tensor."""
    strides: list[Any] = []
    step: Any = 1
    for n in reversed(shape):
        strides.append(step)
        step = product(step, n)
    return tuple(reversed(strides))


def tuple_text(xs: Sequence[Any]) -> str:
    return "(" + "".join(f"{text_of(x)}, " for x in xs) + ")"


def flat(x: Any) -> Iterator[Any]:
    if isinstance(x, tuple | list):
        for y in x:
            yield from flat(y)
    elif isinstance(x, dict):
        yield from flat(tuple(x.values()))
    else:
        yield x


def plain(x: Any) -> Any:
    """Replaces sizes by those of this call."""
    if type(x) is Size:
        return x.value
    if type(x) in (tuple, list):
        return type(x)(map(plain, x))
    if type(x) is dict:
        return {name: plain(y) for name, y in x.items()}
    if type(x) is slice:
        return slice(plain(x.start), plain(x.stop), plain(x.step))
    return x


def concrete(x: Any) -> Any:
    """An argument of a launch with this call's sizes; a descriptor is made again."""
    if type(x) is Size:
        return x.value
    if hasattr(x, "base") and hasattr(x, "block_shape"):
        names = [f for f in ("layout", "padding", "round_f32_to_tf32") if hasattr(x, f)]
        rest = {name: getattr(x, name) for name in names}
        return type(x)(x.base, plain(list(x.shape)), plain(list(x.strides)), x.block_shape, **rest)
    return x
