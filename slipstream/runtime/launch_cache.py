"""Launches that do not ask Triton again which kernel the arguments want.

Triton takes longer to find a kernel by its two dozen arguments than to launch it. `cached(kernel)`
is launched like the kernel, by position or by name, and remembers what Triton found by all that it
decides by: dtypes, which arguments are None, constexprs and options, and of an integer whether it
is 1 or a multiple of 16. What is rare is left to Triton: tensors that do not begin at a multiple of
16 bytes, integers of more than 32 bits, subclasses of tensors, and other types. So is all in the
interpreter and on AMD's GPUs, where the size of the memory behind a tensor counts too.

Launches of compiled kernels as runtime/call_replay.py's records make them: Triton's launcher in
C, and the descriptors for TMA that it takes.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial, reduce
from inspect import getclosurevars
from itertools import takewhile
from operator import attrgetter, itemgetter, or_
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from slipstream.compiler.aot import FUSION, common_options
from slipstream.runtime import backends, symbolic_sizes

if TYPE_CHECKING:
    from slipstream.runtime.recording import Recorder

Pick = Callable[[Any], tuple]

# Descriptors that are kept of tiles of one kind.
MAX_MAPS = 1024
# What a descriptor tells a map for TMA, besides its memory and sizes; the last from Triton 3.7 on.
_DESCRIBED = "padding", "round_f32_to_tf32"


class _Tile:
    """What a descriptor describes, and the tensor that it lies in."""

    def __init__(self, pointer: int, shape: tuple, strides: tuple) -> None:
        self.pointer, self.shape, self.strides = pointer, [*shape], [*strides]

    @property
    def base(self) -> "_Tile":
        return self

    def data_ptr(self) -> int:
        return self.pointer


class TensorMapCache:
    """TMA's descriptors of tiles of one kind.

    Attributes:
        known: by address, shape and strides.
    """

    def __init__(self, like: Any, meta: Any) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        self.known: dict[tuple, Any] = {}
        kinds = {name: getattr(like, name) for name in _DESCRIBED if hasattr(like, name)}
        self._tile = type("_Tile", (_Tile,), kinds)
        # from 3.8 on it takes a third argument, which it does not read
        unread = make_tensordesc_arg.__code__.co_argcount - 2
        self._make, self._rest = make_tensordesc_arg, (meta, *[()] * unread)

    def __call__(self, pointer: int, shape: tuple, strides: tuple) -> Any:
        """Makes one that is not known."""
        if len(self.known) >= MAX_MAPS:
            self.known.clear()
        tile = self._tile(pointer, shape, strides)
        made = self.known[pointer, shape, strides] = self._make(tile, *self._rest)[0]
        return made


_MAPS: dict[str, TensorMapCache] = {}


def maps_of(like: Any, meta: Any) -> TensorMapCache:
    """The descriptors of tiles such as an argument's: launches share them."""
    key = repr((meta, [getattr(like, name, None) for name in _DESCRIBED]))
    return _MAPS.get(key) or _MAPS.setdefault(key, TensorMapCache(like, meta))


class PackedLauncher(NamedTuple):
    """Calls the launcher of Triton 3.7 and later with the arguments that 3.6's takes. The later one
    wants scratch memory after the metadata, and a kernel's arguments as one tuple behind their
    annotations and signature."""

    launch: Callable[..., Any]
    annotations: Any
    signature: Any

    def __call__(self, *args: Any) -> None:
        launch, *kinds = self
        # from 7 on two pointers of scratch memory, from 9 metadata and hooks, from 13 the kernel's
        launch(*args[:7], *args[9:13], *args[7:9], *kinds, args[13:])


def flat_launcher(launcher: Any) -> Callable[..., Any]:
    """The function that a CudaLauncher calls, with the arguments of Triton 3.6."""
    if not hasattr(launcher, "arg_annotations"):
        return launcher.launch
    return PackedLauncher(launcher.launch, launcher.arg_annotations, launcher.kernel_signature)


def c_launcher(run: Callable[..., Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The launcher that takes maps for TMA, and what there is to know of each; they are made in
    Python, by a function around it."""
    if isinstance(run, PackedLauncher):
        launch, known = c_launcher(run.launch)
        return run._replace(launch=launch), known
    if type(run) is not FunctionType:
        return run, ()
    around = getclosurevars(run).nonlocals
    return around["launcher"], around["tensordesc_meta"] or ()


class _OfThread(threading.local):
    """Effects of this thread's launches besides the launch itself.

    Attributes:
        recorder: is told of each (runtime/call_replay.py).
        warmup: where launches only compile their kernels (runtime/parallel_compile.py): what the
            first of them waits for.
        ahead: whether the kernels are for later calls (runtime/compile_ahead.py).
    """

    recorder: "Recorder | None" = None
    warmup: Future | None = None
    ahead = False


of_thread = _OfThread()
F = TypeVar("F", bound=Callable[..., Any])


def cache(function: F) -> F:
    """functools.lru_cache, for functions of sizes: what is remembered has plain integers, also
    where a call is recorded."""
    remembered = functools.lru_cache(4096)(function)  # programs bring new lengths without end

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if (recorder := of_thread.recorder) is not None:
            args = tuple(map(recorder.pinned, args))
            named = {name: recorder.pinned(x) for name, x in named.items()}
        return remembered(*args, **named)

    vars(call)["cache_clear"] = remembered.cache_clear
    return cast(F, call)


def by_sizes(policy: F) -> F:
    """Makes a function of numbers alone, which returns a number, a NamedTuple of numbers or None,
    one line of a record (call_recorder.py). What it decides inside is then no guard: the record
    asks it again. Its result is remembered by its arguments."""
    remembered = functools.lru_cache(4096)(policy)

    @functools.wraps(policy)
    def asked(*args: Any) -> Any:
        recorder = of_thread.recorder
        return remembered(*args) if recorder is None else recorder.ask(remembered, args)

    return cast(F, asked)


# Triton releases whose CompiledKernel.run takes the arguments that CompiledEntry gives it. In
# others kernels are launched by kernel[grid](...), which takes the host longer.
RELEASES = "3.6.", "3.7.", "3.8.", "3.9."
_DESCRIPTOR = "TensorDescriptor"
_dtype = attrgetter("dtype")
# by the identity of kernels, which it keeps alive
_CACHED: dict[int, Any] = {}


def launches_as_plain(x: Tensor) -> bool:
    """Whether a call on x launches what a plain one does (backends.is_plain_call): it is one, or
    stands for one whose launches are only compiled (parallel_compile.py)."""
    if torch.compiler.is_compiling():
        return False
    return backends.is_plain_call(x) or of_thread.warmup is not None


def cached(kernel: Any) -> Any:
    """The kernel with a launch that takes the host less time."""
    try:
        return _CACHED[id(kernel)]
    except KeyError:
        pass
    if backends.INTERPRETED or not backends.HAVE_TRITON:
        return kernel
    from triton import JITFunction

    if not isinstance(kernel, JITFunction):
        return kernel
    if torch.version.hip:
        return FusedKernel(kernel)
    return _CACHED.setdefault(id(kernel), CachedKernel(kernel))


def count_variants() -> int:
    """Compiled variants of all kernels that were launched, or are compiled beside one that was."""
    kernels = [x.kernel for x in _CACHED.values()]
    return sum(len(x[0]) for kernel in kernels for x in kernel.device_caches.values())


class ArgLayout(NamedTuple):
    """The properties of positional arguments that select a compiled kernel, for given types."""

    tensors: Pick
    numbers: Pick  # integers; narrow: all of them that Triton looks at no further
    narrow: Pick
    values: Pick
    described: Pick


class CompiledEntry:
    """A kernel that Triton compiled for some arguments."""

    def __init__(self, compiled: Any) -> None:
        from triton import __version__
        from triton.runtime import driver

        self._compiled, self.run = compiled, None
        self._driver: Any = driver
        if not __version__.startswith(RELEASES):
            return
        from triton import knobs

        self._hooks = knobs.runtime
        self.run, self._handles = compiled.run, (compiled.function,)
        if type(self.run).__name__ == "CudaLauncher" and not _wants_memory(self.run):
            flags = (self.run.launch_cooperative_grid, self.run.launch_pdl)
            self.run, self._handles = flat_launcher(self.run), (*self._handles, *flags, None, None)
        self._handles += (compiled.packed_metadata, None, None, None)  # no hooks

    def launch(self, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """Launches the kernel; grid has all three sizes."""
        if self.run is None or self.is_profiled():
            self._compiled[grid](*args)  # with what a profiler wants to know
            return
        self.run(*self.prefix(grid), *args)

    def is_profiled(self) -> bool:
        return _is_profiled(self._hooks)

    def prefix(self, grid: tuple[int, ...]) -> tuple:
        """The arguments of `run` before the kernel's own."""
        active = self._driver.active
        stream = active.get_current_stream(active.get_current_device())
        return (*grid, stream, *self._handles)

    def record(self, recorder: "Recorder", grid: tuple, args: Sequence[Any]) -> None:
        """Says how the launch is made again; sizes among grid and args are those of the record."""
        maps = [x for x in args if _is_descriptor(x)]
        if self.run is None:
            recorder.launched(None, ())
            return
        run, known = c_launcher(self.run)
        if len(known) != len(maps) or None in known:
            recorder.launched(None, ())
            return
        active = self._driver.active
        recorder.stream = partial(active.get_current_stream, active.get_current_device())
        recorder.is_profiled = partial(_is_profiled, self._hooks)  # and not the kernel
        makers = list(map(maps_of, maps, known))
        recorder.launched(run, (*grid, recorder.STREAM, *self._handles, *args), maps=makers)


def _is_profiled(hooks: Any) -> bool:
    """Whether anything looks at launches; hooks: Triton's knobs."""
    return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)


def _wants_memory(launcher: Any) -> bool:
    """Whether the launcher would have to allocate memory for each program, or for a sanitizer."""
    scratch = launcher.global_scratch_size + launcher.profile_scratch_size
    return scratch > 0 or getattr(launcher, "gsan_enabled", False)


def wrap_compiled(compiled: Any) -> CompiledEntry | None:
    """None where there is nothing to keep: compiler/trace.py or a hook has stopped the launch, or
    it was not compiled for what its key says."""
    if not backends.HAVE_TRITON or backends.INTERPRETED or torch.version.hip:
        return None
    from triton.compiler import CompiledKernel

    return CompiledEntry(compiled) if type(compiled) is CompiledKernel else None


class FusedKernel(NamedTuple):
    """A kernel whose launches are Triton's, and say that products and sums are fused."""

    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel[grid], **FUSION)


class CachedKernel:
    """A JIT function, and what it was compiled to by key_of the arguments."""

    def __init__(self, kernel: Any) -> None:
        from triton.runtime import driver

        self.kernel = kernel
        self._driver: Any = driver
        self._names = [p.name for p in kernel.params]
        self._defaults = {p.name: p.default for p in kernel.params if p.has_default}
        self._orders: dict[tuple, tuple[Pick, list[str], dict[str, Any]]] = {}
        self._places: dict[tuple, tuple[tuple, ArgLayout | None]] = {}
        self._found: dict[tuple, CompiledEntry] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if of_thread.recorder is not None:
            return partial(self._record, of_thread.recorder, (*grid, 1, 1)[:3])

        def run(*args: Any, **named: Any) -> None:
            if named or len(args) < len(self._names):
                args, named = self.in_order(args, named)
            key = self.key_of(args, named)
            entry = None if key is None else self._found.get(key)
            if of_thread.warmup is not None:
                wait([of_thread.warmup])
                if entry is None:
                    given = map(_without_memory, args)
                    self.kernel.warmup(*given, grid=grid, **self._options(named))
                return
            if entry is not None:
                entry.launch((*grid, 1, 1)[:3], args)
                return
            # a kernel that is probed within a recorded call gets that call's sizes
            plain, plain_grid, options = (
                [x.value if isinstance(x, symbolic_sizes.Size) else x for x in given]
                for given in (args, grid, named.values())
            )
            named = dict(zip(named, options))
            compiled = self.kernel[tuple(plain_grid)](*plain, **self._options(named))
            if key is None or len(args) < len(self._names):
                return
            entry = wrap_compiled(compiled)
            if entry is not None:
                self._found[key] = entry

        return run

    def _options(self, named: dict[str, Any]) -> dict[str, Any]:
        return common_options(self._driver.active.get_current_target()) | named

    def in_order(self, args: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments that follow args in the kernel's signature beside them, or their defaults,
        and the rest, which are options of the launch."""
        shape = (len(args), *named)
        order = self._orders.get(shape)
        if order is None:
            given = {**self._defaults, **named}
            following = list(takewhile(given.__contains__, self._names[len(args) :]))
            options = [x for x in named if x not in following]
            defaults = {x: given[x] for x in following if x not in named}
            order = self._orders[shape] = _picking(following), options, defaults
        pick, options, defaults = order
        following = pick(named | defaults if defaults else named)
        return (*args, *following), {x: named[x] for x in options}

    def _record(self, recorder: "Recorder", grid: tuple, *args: Any, **named: Any) -> None:
        """Launches, and says how: sizes are those of a record."""
        given, named = self.in_order(args, named)
        named = {name: recorder.pinned(x) for name, x in named.items()}
        places = [*zip(given, self.kernel.params)]
        given = tuple(recorder.pinned(x) if p.is_constexpr else x for x, p in places)
        with torch._C.DisableTorchFunction():
            plain, plain_grid = map(recorder.plain, (given, grid))
            key = self.key_of(plain, named)
            if key is None or len(given) < len(self._names):
                self.kernel[plain_grid](*plain, **self._options(named))
                recorder.launched(None, ())
                return
            entry = self._found.get(key)
            if entry is not None:
                entry.launch(plain_grid, plain)
            else:
                entry = wrap_compiled(self.kernel[plain_grid](*plain, **self._options(named)))
        if entry is None:
            recorder.launched(None, ())
            return
        self._found[key] = entry
        for x, param in places:
            recorder.guard_number(x, not (param.is_constexpr or param.do_not_specialize))
        entry.record(recorder, grid, given)

    def key_of(self, args: tuple, named: dict[str, Any]) -> tuple | None:
        """A key of all that decides which kernel it is; None where that cannot be told."""
        given = tuple(map(type, args))
        try:
            types, places = self._places[given]
        except KeyError:
            # a parameter is a tensor: records of calls (call_replay.py) have that in its place
            types = tuple(Tensor if x is Parameter else x for x in given)
            places = self._places_of(types)
            self._places[given] = types, places
        if places is None:
            return None
        tensors = places.tensors(args)
        if reduce(or_, map(Tensor.data_ptr, tensors), 0) % 16:
            return None
        numbers = places.numbers(args)
        all_numbers = (*numbers, *places.narrow(args), 0)
        if max(all_numbers) > 0x7FFFFFFF or min(all_numbers) < -0x80000000:
            return None
        return (
            self._driver.active.get_current_device(),
            types,
            *map(_dtype, tensors),
            *[1 if x == 1 else x % 16 == 0 and 16 for x in numbers],
            *places.values(args),
            *map(_described, places.described(args)),
            *named,
            *named.values(),
        )

    def _places_of(self, types: tuple[type, ...]) -> ArgLayout | None:
        places: dict[str, list[int]] = {name: [] for name in ArgLayout._fields}
        for i, (kind, param) in enumerate(zip(types, self.kernel.params)):
            if param.is_constexpr:
                places["values"].append(i)
            elif kind is Tensor:
                places["tensors"].append(i)
            elif kind is int:
                places["narrow" if param.do_not_specialize else "numbers"].append(i)
            elif kind.__name__ == _DESCRIPTOR:
                places["described"].append(i)
            elif kind not in (float, type(None)):
                return None
        return ArgLayout(**{name: _picking(x) for name, x in places.items()})


def _without_memory(x: Any) -> Any:
    """What a launch that only compiles is given: of a fake tensor its dtype, for one that begins at
    a multiple of 16 bytes."""
    return x.dtype if isinstance(x, FakeTensor) else x


def _is_descriptor(x: Any) -> bool:
    return type(x).__name__ == _DESCRIPTOR


def _picking(places: list) -> Pick:
    """A function that picks these places of a tuple, or these keys of a dict."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda args: (args[places[0]],)) if places else (lambda args: ())


def _described(x: Any) -> tuple:
    """The type of a tensor descriptor in a kernel's signature; it begins at a multiple of 16."""
    layout = getattr(x, "layout", None)
    return (x.base.dtype, *x.block_shape, layout, getattr(x, "padding", None))
