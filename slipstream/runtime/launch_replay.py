"""Repeats launches of compiled kernels with other addresses, for runtime/call_replay.py.

Most arguments of a launch are the same each time. Launches in a row are one call: one list has the
stream, which is asked for once, all addresses, the descriptors at them, and what never changes, and
each launch picks its arguments from it.
"""

from collections.abc import Callable, Collection, Sequence
from inspect import getclosurevars
from operator import itemgetter
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from slipstream.runtime.launch_cache import CompiledEntry

# Descriptors that are kept of a launch's argument.
MAX_MAPS = 256
# Of the stream among a launcher's arguments: after the grid's three sizes.
_STREAM = 3


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
        for i, x in enumerate((*args, *entry.constexprs)):
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
        super().__init__()
        self._like = {"shape": like.shape, "strides": like.strides, "padding": like.padding}
        self._meta = meta

    def __missing__(self, pointer: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= MAX_MAPS:
            self.clear()
        base = SimpleNamespace(data_ptr=lambda: pointer)
        made = make_tensordesc_arg(SimpleNamespace(base=base, **self._like), self._meta)
        self[pointer] = made[0]
        return made[0]


def c_launcher(run: Callable[..., Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The launcher that takes maps for TMA, and what there is to know of each; they are made in
    Python, by a function around it."""
    if type(run) is not FunctionType:
        return run, ()
    around = getclosurevars(run).nonlocals
    return around["launcher"], around["tensordesc_meta"]
