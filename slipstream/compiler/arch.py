"""The abilities of each GPU architecture, as data; nothing here touches a device, Triton or torch.

ARCHS["sm_90"].shared       bytes of shared memory one program may use
of((8, 9))                  the row of a device by its compute capability
expect_fits(...)            ValueError that says what is wrong and what would run
instruction(...)            the matrix instruction of a product
closest_legal(...)          the nearest tile that an architecture can run
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar


@dataclass(frozen=True)
class Matrix:
    """One matrix instruction: `rows` x n x `depth` bytes of K by `warps` together, where n is a
    multiple of `columns` up to `widest`."""

    rows: int
    columns: int
    widest: int
    depth: int
    warps: int = 1


MATRICES = {
    "mma.sync": Matrix(16, 8, 8, 32),
    "wgmma": Matrix(64, 8, 256, 32, warps=4),
    "tcgen05": Matrix(64, 8, 256, 32, warps=4),
    "mfma": Matrix(16, 16, 16, 32),
}


@dataclass(frozen=True)
class Arch:
    """shared: bytes a program may use. instruction: the tensor cores' (aot.INSTRUCTIONS) or None.

    dots: dtypes the tensor cores multiply, as Triton 3.4 and later uses them. precisions: of such
    products of float32. warp: threads of one. units: streaming multiprocessors of the usual device.
    threads: of a program.
    """

    name: str
    shared: int
    units: int
    instruction: str | None = None
    dots: tuple[str, ...] = ()
    tma: bool = False
    wgmma: bool = False
    warp: int = 32
    precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3")
    threads: int = 1024

    @property
    def matrix(self) -> Matrix | None:
        return None if self.instruction is None else MATRICES[self.instruction]

    @property
    def capability(self) -> tuple[int, int]:
        if self.name.startswith("gfx"):
            return (9, 4)
        return divmod(int(self.name.removeprefix("sm_")), 10)


_FLOATS = ("fp16", "bf16", "tf32")
_FP8 = (*_FLOATS, "fp8e4nv", "fp8e5")
_MFMA = ("fp16", "bf16", "fp8e4b8")
_KB = 1024
# sm_70 and sm_75 have tensor cores, which Triton uses up to 3.2 only: dots run on FMA units there.
ARCHS = {
    x.name: x
    for x in (
        Arch("sm_70", 96 * _KB, 80),
        Arch("sm_75", 64 * _KB, 40),
        Arch("sm_80", 163 * _KB, 108, "mma.sync", _FLOATS),
        Arch("sm_86", 99 * _KB, 84, "mma.sync", _FLOATS),
        Arch("sm_89", 99 * _KB, 128, "mma.sync", _FP8),
        Arch("sm_90", 227 * _KB, 132, "wgmma", _FP8, tma=True, wgmma=True),
        Arch("sm_100", 227 * _KB, 148, "tcgen05", _FP8, tma=True),
        Arch("sm_120", 99 * _KB, 188, "mma.sync", _FP8, tma=True),
        Arch("gfx942", 64 * _KB, 304, "mfma", _MFMA, warp=64, precisions=("ieee",)),
    )
}
# The releases of Triton under which the kernels in Gluon are used.
GLUON_RELEASES = ((3, 6), (3, 9))
# Capabilities without a row of their own, by the row that has their limits.
_LIKE = {(7, 2): "sm_70", (8, 7): "sm_80", (10, 3): "sm_100", (11, 0): "sm_100", (12, 1): "sm_120"}


def named(name: str) -> Arch:
    """The row of "sm_90", "gfx942" ...; ValueError that lists them all."""
    if name not in ARCHS:
        raise ValueError(f"arch: want one of {', '.join(ARCHS)}, got {name!r}")
    return ARCHS[name]


def of(capability: tuple[int, int], hip: bool = False) -> Arch:
    """The row of a device; an unknown one gets the limits of the nearest below, under its own name.

    A later device has at least its predecessor's units, except sm_90's wgmma and sm_100's tcgen05.
    """
    if hip:
        return ARCHS["gfx942"]
    name = "sm_{}{}".format(*capability)
    if name in ARCHS:
        return ARCHS[name]
    if capability in _LIKE:
        return replace(ARCHS[_LIKE[capability]], name=name)
    below = [x for x in ARCHS.values() if x.name != "gfx942" and x.capability < capability]
    near = max(below, key=lambda x: x.capability, default=ARCHS["sm_75"])
    shared = min(near.shared, ARCHS["sm_86"].shared)
    return replace(near, name=name, shared=shared, wgmma=False)


def like(name: str) -> str:
    """The row with the limits of "sm_121" ...; a name that has one of its own, or none, is it."""
    if name.startswith("gfx"):
        return "gfx942"
    digits = name.removeprefix("sm_")
    if name in ARCHS or not digits.isdigit():
        return name
    return _LIKE.get(divmod(int(digits), 10), name)


def expect_fits(what: str, shared: int, arch: Arch, nearest: str = "") -> None:
    """Raises ValueError if `what` needs more shared memory than a program of `arch` may use.

    Args:
        nearest: the nearest configuration that runs, in words.
    """
    if shared <= arch.shared:
        return
    able = [x.name for x in ARCHS.values() if x.shared >= shared]
    way = nearest or (f"it runs on {', '.join(able)}" if able else "no architecture has as much")
    raise ValueError(
        f"{what}: needs {shared} bytes of shared memory, {arch.name} has {arch.shared}; {way}"
    )


T = TypeVar("T")


def instruction(arch: Arch, rows: int, warps: int) -> str | None:
    """The matrix instruction of a product with so many rows, None: plain arithmetic."""
    if arch.matrix is None or (rows >= arch.matrix.rows and warps % arch.matrix.warps == 0):
        return arch.instruction
    return "mma.sync"


def closest_legal(
    tile: Any,
    changed: Callable[..., T],
    reason_of: Callable[[T], str | None],
    sizes: Mapping[str, Sequence[Any]],
) -> T | None:
    """The tile that works with the fewest halvings and doublings of its sizes.

    Args:
        changed: takes the tile and new values of fields.
        sizes: by field, the values it may have; of what is no number another one is four steps.
    """
    best, min_steps = None, math.inf
    for values in itertools.product(*sizes.values()):
        named = dict(zip(sizes, values))
        away = sum(_steps(getattr(tile, name), x) for name, x in named.items())
        if away < min_steps and reason_of(near := changed(tile, **named)) is None:
            best, min_steps = near, away
    return best


def way_out(near: object) -> str:
    return "there is none that works" if near is None else f"the nearest that works is {near}"


def _steps(a: object, b: object) -> float:
    if isinstance(b, bool) or not isinstance(b, int):
        return 4 * (a != b)
    return abs(math.log2(max(a if isinstance(a, int) else 1, 1) / b))
