"""Whether tiles of the Triton kernels can run on an architecture, before anything is compiled.

A tile is described by TileRequirements; what each architecture has is in compiler/arch.py. Shared
memory is a lower bound: what passes may still be refused by what the compiler reports, what fails
can never run.

C tokens a chunk, BX or BV columns of the state a program, BD or BK all of its rows; of attention BM
queries and BN keys, heads of BD (q, k) and BV (v); of norms BR rows of BD features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.compiler.arch import Arch
from slipstream.compiler.tile_limits import instruction


@dataclass(frozen=True)
class TileRequirements:
    """size: bytes an element. products: M, N, K of each. loads: elements of the blocks that a step
    brings into shared memory. held: elements that stay in it where wgmma multiplies. sums: float32
    that a program keeps in registers. boxes: what TMA brings at once, the last dimension inmost.
    """

    size: int
    warps: int
    stages: int
    products: tuple[tuple[int, int, int], ...] = ()
    loads: tuple[int, ...] = ()
    resident: int = 0
    sums: int = 0
    boxes: tuple[tuple[int, ...], ...] = ()


def violation(n: TileRequirements, arch: Arch) -> str | None:
    """The part of a tile that the architecture cannot do, or None."""
    max_warps = arch.threads // arch.warp
    if not _is_power(n.warps) or n.warps > max_warps:
        return f"warps: want a power of two up to {max_warps}, got {n.warps}"
    if not 1 <= n.stages <= 8:
        return f"stages: want 1 to 8, got {n.stages}"
    for shape in n.products:
        if not all(_is_power(x) and x >= 16 for x in shape):
            return f"a product of {_by(shape)}: want powers of two from 16 on"
    return _of_products(n, arch) or _of_boxes(n, arch) or _of_capacity(n, arch)


def _of_products(n: TileRequirements, arch: Arch) -> str | None:
    narrow = [x for x in n.products if len(n.products) > 1 and x[1] in (16, 32)]
    for shape in narrow:
        if arch.wgmma and instruction(arch, shape[0], n.warps) == "wgmma":
            return f"a wgmma of {shape[1]} columns beside other products is miscompiled"
    return None


def _of_boxes(n: TileRequirements, arch: Arch) -> str | None:
    for box in n.boxes:
        if not arch.tma:
            return f"{arch.name} has no TMA"
        if len(box) > arch.box_dims or max(box) > arch.box_side:
            return f"TMA takes {arch.box_dims} dimensions of up to {arch.box_side}, not {_by(box)}"
        if box[-1] * n.size % 16:
            return f"TMA takes rows of multiples of 16 bytes, not of {box[-1] * n.size}"
    return None


def _of_capacity(n: TileRequirements, arch: Arch) -> str | None:
    threads = n.warps * arch.warp
    if n.sums > threads * arch.registers:
        return f"{n.sums // threads} sums a thread do not fit its {arch.registers} registers"
    shared = shared_bytes(n, arch)
    if shared > arch.shared:
        return f"needs {shared} bytes of shared memory, {arch.name} has {arch.shared}"
    return None


def shared_bytes(n: TileRequirements, arch: Arch) -> int:
    """No tile gets by with less: one of its stages may stay in registers."""
    wgmma = any(instruction(arch, M, n.warps) == "wgmma" for M, _, _ in n.products)
    resident = n.resident if wgmma else 0
    if n.stages == 1:
        return (max(n.loads, default=0) + resident) * n.size
    return ((n.stages - 1) * sum(n.loads) + resident) * n.size


def _is_power(x: int) -> bool:
    return x > 0 and not x & (x - 1)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
