"""Whether tiles of the Triton kernels can run on an architecture, before anything is compiled. A
tile is described by TileRequirements; what each architecture has is in compiler/arch.py. Shared
memory is a lower bound: what passes may still be refused by what the compiler reports, what fails
can never run. C tokens a chunk, BX or BV columns of the state a program, BD or BK all of its rows;
of attention BM queries and BN keys, heads of BD (q, k) and BV (v); of norms BR rows of BD
features."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.compiler.arch import Arch, instruction
from slipstream.kernels.attention.triton import tiles as attention
from slipstream.kernels.linear.triton.delta.plan import DeltaTile
from slipstream.kernels.linear.triton.dplr.tiles import DplrTile
from slipstream.kernels.linear.triton.scalar_decay.tiles import Tile
from slipstream.kernels.linear.triton.vector_decay.tiles import VectorDecayTile
from slipstream.kernels.norm import triton_launch as norms

_CHUNK_KERNELS = ("fwd", "fwd_states", "dstate")


@dataclass(frozen=True)
class TileRequirements:
    """size: bytes an element. products: M, N, K of each. loads: elements of the blocks that a step
    brings into shared memory. held: elements that stay in it where wgmma multiplies. sums: float32
    that a program keeps in registers. boxes: what TMA brings at once, the last dimension inmost."""

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


def chunk_requirements(tile: Tile, BD: int, size: int) -> TileRequirements:
    """y = s r^T + x a, s += x w: the state [BX, BD] stays in registers."""
    C, BX = tile.C, tile.BX
    return TileRequirements(
        size,
        tile.warps,
        tile.stages,
        ((C, C, BD), (BX, C, BD), (BX, C, C), (BX, BD, C)),
        loads=(C * BD, C * BX),
        sums=BX * BD,
        boxes=((1, C, 1, BD), (1, C, 1, BX)) if tile.tma else (),
    )


def kernel_requirements(
    tile: DeltaTile | VectorDecayTile | DplrTile, BK: int, size: int
) -> dict[str, TileRequirements]:
    """By the field of the tile: the scans keep [BV, BK], the other kernels make [C, C] and [C, B]
    of B channels at a time."""
    requirements = {}
    for name, kernel_tile in vars(tile).items():
        if name in ("C", "tma"):
            continue
        C, B = tile.C, kernel_tile.BK if isinstance(tile, VectorDecayTile) else kernel_tile.B
        if name in _CHUNK_KERNELS:
            products = ((C, C, BK), (B, C, BK), (B, C, C), (B, BK, C))
            requirements[name] = TileRequirements(
                size, kernel_tile.warps, kernel_tile.stages, products, (C * BK, C * B), sums=B * BK
            )
        else:
            products = ((C, C, B), (C, B, C))
            requirements[name] = TileRequirements(
                size, kernel_tile.warps, kernel_tile.stages, products, (C * B,), sums=C * B
            )
    return requirements


def of_linear(tile: Any, width: int, size: int) -> list[TileRequirements]:
    """Limits of a row of any of the family's tables, for K (or the scan's D) of `width`."""
    return (
        [chunk_requirements(tile, width, size)]
        if isinstance(tile, Tile)
        else list(kernel_requirements(tile, width, size).values())
    )


def of_attention(
    kernel: str, tile: attention.Tile, BD: int, BV: int, size: int
) -> TileRequirements:
    """kernel: a field of Tiles, or "latent"."""
    M, N = tile.BM, tile.BN
    queries, keys = M * (BD + BV), N * (BD + BV)
    scores = ((M, N, BD), (M, BV, N))
    if kernel == "forward":
        return TileRequirements(
            size, tile.warps, tile.stages, scores, (N * BD, N * BV), M * BD, sums=M * BV
        )
    if kernel in ("decode", "latent"):
        return TileRequirements(
            size, tile.warps, tile.stages, scores, (N * BD, N * BV), sums=M * BV
        )
    if kernel == "dq":
        products = ((M, N, BD), (M, N, BV), (M, BD, N))
        return TileRequirements(
            size, tile.warps, tile.stages, products, (N * BD, N * BV), queries, sums=M * BD
        )
    products = ((N, M, BD), (N, M, BV), (N, BV, M), (N, BD, M))
    return TileRequirements(
        size, tile.warps, tile.stages, products, (M * BD, M * BV), keys, sums=N * BD
    )


def of_norm(tile: norms.Tile, size: int) -> TileRequirements:
    row = tile.BR * tile.BD
    ahead = (row,) * 5 if tile.stages > 1 else ()
    return TileRequirements(size, tile.warps, tile.stages, loads=ahead, sums=row)
