"""Launches of compiled kernels as runtime/call_replay.py's records make them: Triton's launcher in
C, and the descriptors for TMA that it takes."""

from collections.abc import Callable, Sequence
from inspect import getclosurevars
from types import FunctionType
from typing import Any, NamedTuple

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
