"""The pair that a KernelOp runs: a launch of kernels, and its plain twin where a compiler fails.

A launch is named by its module and function, "slipstream.kernels.x.triton.x:forward": Triton is
imported where one is wanted, and the device of the tensors is the current one, on which Triton
launches. The plain twin is the same computation in torch. Both take the operator's arguments
without impl, of which those that are the fields of a NamedTuple come as one. Its probe asks whether
the two agree on a small fresh problem: outputs and gradients, within a bar that rounding stays
below and a wrong tile does not.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from slipstream.compiler.compiler_state import KernelKey
from slipstream.runtime import backends, dispatch
from slipstream.runtime.guarded_launch import Guard, plain_gradients
from slipstream.runtime.launch_cache import of_thread
from slipstream.runtime.recording import use_recorder
from slipstream.runtime.symbolic_sizes import value_of

# The tensors of a probe that are not as the call's are, by the arguments' names. A tuple is a
# shape: 0 is the call's own size, counted from the last, and a final ... all of its further sizes.
# A function is given those of the call's arguments that its parameters name, and makes a value.
# Anything else is the value itself.
Probe = Mapping[str, Any]
# Or what says how kernels and plain torch differ, by the names of its parameters.
Mismatch = Callable[..., str | None]


def launch_of(kernel: str) -> Callable:
    """The launch of that name, "module:function"."""
    module, _, function = kernel.partition(":")
    return getattr(sys.modules.get(module) or import_module(module), function)


def guarded(
    impl: str,
    device: torch.device,
    kernel: str,
    plain: Callable,
    args: tuple,
    kind: Callable[[], KernelKey],
    mismatch: Callable[[], str | None],
    **named: Any,
) -> Any:
    """A launch inside of a Guard, else its plain twin, where that is no operator of its own.

    Args:
        kernel, plain: as this module has them, both called with args and named.
        impl, device, kind, mismatch: the Guard's.
    """
    if impl.startswith(dispatch.PLAIN):
        return plain(*args, **named)
    with Guard(impl, device, kind, mismatch) as usable, backends.device_of(device):
        if usable:
            return launch_of(kernel)(*args, **named)
    return _unrecorded(plain, args, named)


def _unrecorded(plain: Callable, args: tuple, named: Mapping[str, Any]) -> Any:
    """plain(*args, **named), where kernels are refused: no record repeats it."""
    recorder = of_thread.recorder
    if recorder is None:
        return plain(*args, **named)
    recorder.launched(None, ())
    args, named = tree_map(value_of, (args, dict(named)))
    with use_recorder(None), torch._C.DisableTorchFunction():
        return plain(*args, **named)


class KernelPair:
    """A function of an operator's arguments: by the kernels inside of a Guard, else in plain torch.

    Args:
        names: of the operator's arguments, among them impl.
        kernel, plain: as this module has them; what they return is None where there is no result.
        kind: of the arguments that its parameters name, what a verdict on the kernels holds for.
        mismatch: given the operator's arguments, compares kernels and plain torch.
        packed: name of a NamedTuple of arguments -> its type.
        is_list: whether results that are None are left out; else they are of no elements.
        in_torch_if: of the arguments that its parameters name, whether kernels have nothing to do,
            as where there are no tokens. None is never.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        kernel: str,
        plain: Callable,
        kind: Callable[..., KernelKey],
        mismatch: Callable[[tuple], str | None],
        packed: Mapping[str, type] = MappingProxyType({}),
        is_list: bool = False,
        in_torch_if: Callable[..., bool] | None = None,
    ) -> None:
        self.kernel = kernel
        self.plain, self._mismatch, self._is_list = plain, mismatch, is_list
        self._impl = names.index("impl")
        self.arguments, places = _arguments(names, packed)
        self._packed = [place for place in places if place[0] is not None]
        self._names, self._packed_names = (*names, *packed), {*packed}
        self._kind = self.named(kind)
        self._in_torch_if = None if in_torch_if is None else self.named(in_torch_if)

    def __call__(self, *args: Any) -> Any:
        call, impl = self.arguments(args), args[self._impl]
        skips = self._in_torch_if
        if impl.startswith(dispatch.PLAIN) or (skips is not None and skips(args)):
            return _contiguous(self._results(self.plain(*call)))
        kind, mismatch = partial(self._kind, args), partial(self._mismatch, args)
        device = args[0].device
        with Guard(impl, device, kind, mismatch) as usable, backends.device_of(device):
            if usable:
                return self._results(launch_of(self.kernel)(*call))
        return _contiguous(self._results(_unrecorded(self.plain, call, {})))

    def named(self, function: Callable) -> Callable[[tuple], Any]:
        """The function of the operator's arguments and NamedTuples that its parameters name."""
        of = by_name(function, self._names)
        if self._packed_names.isdisjoint(inspect.signature(function).parameters):
            return of
        return lambda args: of((*args, *[kind(*args[at:end]) for kind, at, end in self._packed]))

    def in_torch(self, *args: Any) -> Any:
        """The plain twin's, of the operator's arguments."""
        return _contiguous(self._results(self.plain(*self.arguments(args))))

    def _results(self, found: Any) -> Any:
        if found is None or isinstance(found, Tensor):
            return found
        if self._is_list:
            return [x for x in found if x is not None]
        for x in found:  # a loop, as most calls have results alone
            if x is None:
                first = next(y for y in found if y is not None)
                return tuple([first.new_empty(0) if y is None else y for y in found])
        return found


def _contiguous(found: Any) -> Any:
    """As the operator's fake has them."""
    if found is None or isinstance(found, Tensor):
        return found if found is None else found.contiguous()
    return type(found)([x.contiguous() for x in found])


# An argument's place, or those of a NamedTuple's first one and behind its last one, and its type.
_Place = tuple[Any, int, int]


def _arguments(
    names: tuple[str, ...], packed: Mapping[str, type]
) -> tuple[Callable[[tuple], tuple], list[_Place]]:
    """The arguments of kernels and plain torch, from the operator's, and their places."""
    begins: dict[str, _Place] = {}
    for kind in packed.values():
        fields: tuple[str, ...] = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
        begin = names.index(fields[0])
        assert names[begin : begin + len(fields)] == fields, f"{kind}: {names}"
        begins[fields[0]] = kind, begin, begin + len(fields)
    places: list[_Place] = []
    at = 0
    while at < len(names):
        place = begins.get(names[at], (None, at, at + 1))
        places += [place] * (names[at] != "impl")
        at = place[2]
    if not packed and names[-1] == "impl":
        return _without_last, places
    return partial(_packed, places), places


def _without_last(args: tuple) -> tuple:
    return args[:-1]


def _packed(places: list[_Place], args: tuple) -> tuple:
    return tuple([args[at] if kind is None else kind(*args[at:end]) for kind, at, end in places])


def by_name(function: Callable, names: tuple[str, ...]) -> Callable[[Sequence[Any]], Any]:
    """The function of values of these names, of which it takes those that it has parameters for."""
    places = [names.index(x) for x in inspect.signature(function).parameters]

    def call(values: Sequence[Any]) -> Any:
        return function(*[values[n] for n in places])

    return call


def fresh(probe: Probe, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a small problem of the kind of `given`."""
    return {name: _fresh(probe.get(name, (...,)), x, given) for name, x in given.items()}


def _fresh(wanted: Any, x: Any, given: Mapping[str, Any]) -> Any:
    if callable(wanted):
        return wanted(*[given[name] for name in inspect.signature(wanted).parameters])
    if not isinstance(wanted, tuple):
        return wanted
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if wanted[-1] is ...:
        shape = (*wanted[:-1], *x.shape[len(wanted) - 1 :])
    else:
        shape = [n or x.shape[i - len(wanted)] for i, n in enumerate(wanted)]
    return random_like(x, *shape)


def compare(
    kernels: Callable,
    plain: Callable,
    given: Mapping[str, Any],
    written: Sequence[str],
    gradients: bool,
) -> str | None:
    """Compares what two functions of the same arguments return and what they write."""
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    bars = {name: BARS[x.dtype][0] for name, x in tensors.items() if x.is_floating_point()}
    # what is compared is rounded to the shortest of the dtypes, the first one's in `mismatch`
    tensors = {(first := max(bars, key=bars.__getitem__)): tensors[first]} | tensors
    written = [name for name in written if name in tensors]

    def run(function: Callable, t: Given) -> tuple[Any, ...]:
        found = function(*(dict(given) | dict(t)).values())
        results = () if found is None else (found,) if isinstance(found, Tensor) else found
        return (*[x for x in results if x is None or x.numel()], *[t[name] for name in written])

    return mismatch(
        lambda t: run(kernels, t), lambda t: run(plain, t), tensors, gradients=gradients
    )


def gradients_in_torch(
    plain: Callable[..., Any],
    names: Sequence[str],
    backward_names: Sequence[str],
    results: Sequence[str],
    wrt: Sequence[str],
    fixed: Mapping[str, Any],
) -> Callable[..., list[Tensor]]:
    """The plain twin of a backward: the gradients of the forward's plain twin, by autograd.

    Args:
        plain: of the forward's arguments, which `names` are. fixed: those the backward has not.
        backward_names: of the backward's arguments but impl, among them dy for a result y.
    """

    def backward(*call: Any) -> list[Tensor]:
        given = dict(zip(backward_names, _flat(call), strict=True)) | {**fixed, "impl": "eager"}

        def run(*leaves: Any) -> Any:
            values = given | dict(zip(wrt, leaves, strict=True))
            return plain(*[values[x] for x in names])

        return plain_gradients(run, [given[x] for x in wrt], [given.get(f"d{y}") for y in results])

    return backward


def _flat(call: Sequence[Any]) -> list[Any]:
    """Without the NamedTuples."""
    return [y for x in call for y in (x if isinstance(x, tuple) else [x])]


# Relative errors, root mean square: of outputs, of gradients. In 16 bits the inputs' own rounding
# is not in it: plain torch gets the rounded ones.
BARS = {torch.float32: (1e-4, 1e-3), torch.float16: (5e-3, 2e-2), torch.bfloat16: (2e-2, 5e-2)}
TOKENS = 150  # of a probe: more than a tile, and no multiple of one

Given = Mapping[str, Any]


def mismatch(
    kernels: Callable[[Given], Any],
    plain: Callable[[Given], Any],
    given: Given,
    gradients: bool = True,
    minimum_bar: float = 0.0,
) -> str | None:
    """The difference between two functions' outputs (a tensor, or several) and gradients, or None.

    `plain` gets the floating ones of `given` in float32. minimum_bar: of outputs, where they are
    rounded to less than their dtype.
    """
    dtype = next(x.dtype for x in given.values() if x is not None and x.is_floating_point())
    output_bar, gradient_bar = BARS[dtype]
    output_bar = max(output_bar, minimum_bar)
    with torch.set_grad_enabled(gradients):
        got = _run(kernels, {name: _leaf(x, None) for name, x in given.items()}, None)
        want = _run(plain, {n: _leaf(x, torch.float32) for n, x in given.items()}, got[1])
    pairs = [
        (f"output {i}", x, y, output_bar)
        for i, (x, y) in enumerate(zip(got[0], want[0], strict=True))
    ]
    pairs += [(f"gradient of {n}", got[2][n], want[2][n], gradient_bar) for n in want[2]]
    for name, x, y, bar in pairs:
        error = relative_error(x, y)
        if not error <= bar:
            return f"{name} is off by {error:.1e} of its size, at most {bar:.0e} is rounding"
    return None


def _run(
    call: Callable[[Given], Any], given: Given, douts: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs, what came into them, gradients by name."""
    out = call(given)
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    wanted = [x for x in outs if x.requires_grad]
    if douts is None:
        douts = [torch.randn_like(x) for x in wanted]
    leaves = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    grads = []
    if wanted:
        douts_of = [d.to(x.dtype) for d, x in zip(douts, wanted)]
        grads = torch.autograd.grad(wanted, list(leaves.values()), douts_of, allow_unused=True)
    named = {name: x for name, x in zip(leaves, grads) if x is not None}
    return [x.detach() for x in outs], douts, named


def _leaf(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`. Infinities that are the same differ
    by 0, as the log-sum-exp of a query that sees no key; nan, which no bar admits, where got has
    one."""
    got, want = got.float(), want.float()
    same = (got == want) & want.isinf()
    difference = (got - want).masked_fill(same, 0.0)
    size = want.masked_fill(same, 0.0).square().mean().sqrt().clamp(min=1e-20)
    return (difference.square().mean().sqrt() / size).item()


def random_like(x: Tensor, *shape: int) -> Tensor:
    """Normal numbers of x's dtype, on its device."""
    return torch.randn(*shape, device=x.device).to(x.dtype)
