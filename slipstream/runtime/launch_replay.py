"""Repeats launches of compiled kernels with other addresses, for runtime/call_replay.py.

Most arguments of a launch are the same each time. Launches in a row are one call: one list has the
stream, which is asked for once, all addresses, the descriptors at them, and what never changes, and
each launch picks its arguments from it.
"""

from collections.abc import Callable, Collection, Sequence
from inspect import getclosurevars
from operator import itemgetter
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from slipstream.runtime.launch_cache import CompiledEntry

# Descriptors that are kept of a launch's argument.
MAX_MAPS = 256
# Places among a launcher's arguments: the grid's three sizes, the stream, function and two flags;
# two pointers of scratch memory; metadata and hooks; the kernel's own.
_STREAM, _SCRATCH, _METADATA, _KERNEL = 3, 7, 9, 13
# What a descriptor tells a map for TMA, besides its memory; the last from Triton 3.7 on.
_DESCRIBED = "shape", "strides", "padding", "round_f32_to_tf32"


class ReplayedLaunch:
    """A launch for other memory at the same places: runtime/call_recorder.py's Launch."""

    def __init__(
        self,
        entry: "CompiledEntry",
        run: Callable[..., Any],
        grid: tuple[int, ...],
        args: tuple,
        given: Collection[int],
        maps: Sequence["TensorMapCache"],
    ) -> None:
        """given: places of memory in args; maps: of those that are descriptors, in order."""
        self.run, self.stream, self.is_profiled = run, entry.stream_getter(), entry.is_profiled
        self._profiler_args = entry.profiler_args
        self.args = list(entry.prefix(grid))
        self._prefix_len = len(self.args)
        self.places, self.maps = [], []
        left = iter(maps)
        for i, x in enumerate(args):
            self.args.append(x)
            if i in given:
                self.places.append(len(self.args) - 1)
                if not isinstance(x, Tensor):
                    self.maps.append((len(self.args) - 1, next(left)))
                    self.args += [*x.shape, *x.strides]
        for place in self.places:
            self.args[place] = None  # their memory is not kept

    def __call__(self, pointers: Sequence[int]) -> None:
        args = self.args.copy()
        args[_STREAM] = self.stream()
        for place, pointer in zip(self.places, pointers):
            args[place] = pointer
        for place, map_of in self.maps:
            args[place] = map_of[args[place]]
        if self.is_profiled():
            args[self._prefix_len - 3 : self._prefix_len] = self._profiler_args()
        self.run(*args)


class LaunchBatch:
    """Launches in a row, each with the places of its pointers among all that are given."""

    def __init__(self, launches: Sequence[tuple[ReplayedLaunch, Sequence[int]]]) -> None:
        first = launches[0][0]
        self.launches, self._stream, self._is_profiled = launches, first.stream, first.is_profiled
        pointers = 1 + max(i for _, places in launches for i in places)
        self._maps = [
            (map_of, places[x.places.index(at)]) for x, places in launches for at, map_of in x.maps
        ]
        constants: dict[int, tuple[int, Any]] = {}  # by identity, as 1 == 1.0
        begin = 1 + pointers + len(self._maps)
        maps = iter(range(1 + pointers, begin))
        self._calls = []
        for x, places in launches:
            picked = [
                constants.setdefault(id(value), (begin + len(constants), value))[0]
                for value in x.args
            ]
            picked[_STREAM] = 0
            for at, place in zip(x.places, places):
                picked[at] = 1 + place
            for at, _ in x.maps:
                picked[at] = next(maps)
            self._calls.append((x.run, itemgetter(*picked)))
        self._constants = [value for _, value in constants.values()]

    def __call__(self, pointers: Sequence[int]) -> None:
        if self._is_profiled():
            for launch, places in self.launches:
                launch([pointers[i] for i in places])
            return
        maps = [map_of[pointers[place]] for map_of, place in self._maps]
        given = [self._stream(), *pointers, *maps, *self._constants]
        for run, pick in self._calls:
            run(*pick(given))


class TensorMapCache(dict[int, Any]):
    """TMA's descriptors, by address: those of memory that is allocated again are made."""

    def __init__(self, like: Any, meta: Any) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        super().__init__()
        names = [x for x in _DESCRIBED if hasattr(like, x)]
        self._like = {name: getattr(like, name) for name in names}
        # from 3.8 on it takes a third argument, which it does not read
        unread = make_tensordesc_arg.__code__.co_argcount - 2
        self._make, self._rest = make_tensordesc_arg, (meta, *[()] * unread)

    def __missing__(self, pointer: int) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        base = SimpleNamespace(data_ptr=lambda: pointer)
        made = self._make(SimpleNamespace(base=base, **self._like), *self._rest)
        self[pointer] = made[0]
        return made[0]


class PackedLauncher(NamedTuple):
    """Calls the launcher of Triton 3.7 and later with the arguments that 3.6's takes. The later one
    wants scratch memory after the metadata, and a kernel's arguments as one tuple behind their
    annotations and signature."""

    launch: Callable[..., Any]
    annotations: Any
    signature: Any

    def __call__(self, *args: Any) -> None:
        launch, *kinds = self
        launch(
            *args[:_SCRATCH],
            *args[_METADATA:_KERNEL],
            *args[_SCRATCH:_METADATA],
            *kinds,
            args[_KERNEL:],
        )


def flat_launcher(launcher: Any) -> Callable[..., Any]:
    """What a CudaLauncher calls, with the arguments of Triton 3.6."""
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
