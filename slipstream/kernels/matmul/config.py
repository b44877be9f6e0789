"""The options of a matmul, and its tiles: what one may be, which is taken, and what forbids one.

check(...)   ValueError, before anything is compiled, that says what the instructions, the shared
             memory or TMA forbid, and the nearest configuration that works
choose(...)  the default, from tables by architecture, dtype and whether the tiles fill the device

z = (a b) * scale_a * scale_b + bias        out = f(z) + residual
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler import arch as tiles
from slipstream.compiler.arch import Arch

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "relu": F.relu,
    "squared_relu": lambda z: F.relu(z).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
ACTIVATIONS = (*_FUNCTIONS,)[1:]
# of products of float32: by TensorFloat32 once or three times, or by fused multiply-adds
PRECISIONS = ("tf32", "tf32x3", "ieee")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALVES = (torch.float16, torch.bfloat16)


class MatmulInputs(NamedTuple):
    """a [M, K], b [K, N], bias [N], residual [M, N], scale_a [M] or [], scale_b [N] or [].

    activation "" is none.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None
    residual: Tensor | None
    scale_a: Tensor | None
    scale_b: Tensor | None
    activation: str
    precision: str
    out_dtype: torch.dtype


def scaled(z: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    """z [M, N] times the factors of its rows and columns."""
    if scale_a is not None:
        z = z * (scale_a[:, None] if scale_a.dim() else scale_a).to(z.dtype)
    return z if scale_b is None else z * scale_b.to(z.dtype)


def activated(z: Tensor, name: str) -> Tensor:
    return _FUNCTIONS[name](z)


def epilogue(t: MatmulInputs) -> tuple[dict[str, Tensor | None], dict[str, int]]:
    """Arguments of kernels: what is done to the sums, with adjacent elements, and its strides."""
    residual = t.residual
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    sa, sb = (None if x is None else x.float().contiguous() for x in (t.scale_a, t.scale_b))
    bias = None if t.bias is None else t.bias.contiguous()
    return {"bias_ptr": bias, "r_ptr": residual, "sa_ptr": sa, "sb_ptr": sb}, {
        "r_stride": 0 if residual is None else residual.stride(0),
        "sa_stride": 0 if sa is None else sa.dim(),
        "sb_stride": 0 if sb is None else sb.dim(),
    }


def row_by_row(x: Tensor) -> bool:
    """Whether TMA can read x's rows."""
    step = x.stride(0) * x.element_size()
    return x.stride(1) == 1 and step > 0 and step % 16 == 0


def tma_swaps(t: MatmulInputs) -> bool:
    """Whether the sm_90 kernel multiplies b^T a^T: its right factor of 32 bits goes along K."""
    a, b = t.a, t.b
    return a.element_size() == 4 and row_by_row(a) and row_by_row(b) and not row_by_row(b.t())


KERNELS = ("tma", "pointer")
# Of the nearest configuration that works.
SIZES = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "block_k": (16, 32, 64, 128),
    "num_warps": (1, 2, 4, 8, 16),
}
# One program of the TMA kernel: two warpgroups of 64 rows, slices of 128 bytes.
TMA_ROWS, TMA_BYTES = 128, 128
# Programs that may share a tile, each with a part of K.
MAX_SPLIT_K = 8


@dataclass(frozen=True)
class MatmulConfig:
    """A tile of block_m x block_n, block_k at a time.

    Args:
        block_m, block_n: rows and columns of the output that one program computes.
        block_k: columns of a and rows of b in one step.
        num_warps: warps of a program.
        num_stages: steps that are loaded ahead.
        group_m: rows of tiles that run at the same time, so that they share what they read.
        kernel: "tma" (sm_90 only, its two warpgroups are num_warps=8) or "pointer", for any GPU.
        split_k: programs that share a tile, each with a part of K; for "pointer".
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 3
    group_m: int = 8
    kernel: str = "pointer"
    split_k: int = 1

    def pack(self) -> tuple[int, ...]:
        """As numbers, for an operator's arguments."""
        *sizes, kernel, split_k = astuple(self)
        return (*sizes, KERNELS.index(kernel), split_k)


def unpack(numbers: Sequence[int]) -> MatmulConfig:
    return MatmulConfig(*numbers[:-2], kernel=KERNELS[numbers[-2]], split_k=numbers[-1])


@dataclass(frozen=True)
class Problem:
    """The properties that choose tiles, besides the device: dtypes, precision of float32 products,
    order in memory (a_t: a column by column, b_t: b column by column; swaps: tma_swaps)."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    precision: str
    a_t: bool = False
    b_t: bool = False
    swaps: bool = False
    residual: torch.dtype | None = None

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    def instruction(self, c: MatmulConfig, arch: Arch) -> str | None:
        """The matrix instruction that a configuration uses, None where it is plain arithmetic."""
        if self.dtype == torch.float32 and self.precision == "ieee":
            return None
        return tiles.instruction(arch, c.block_m, c.num_warps)


def column_levels(block_n: int, itemsize: int) -> int:
    """How often sm_90 halves a tile's columns to store them: into blocks of at most TMA_BYTES, and
    into two at least, since one of two buffers is stored while the other is written."""
    return max((block_n * itemsize // TMA_BYTES).bit_length() - 1, 1)


def shared_bytes(c: MatmulConfig, p: Problem, arch: Arch) -> int:
    """At most so much shared memory, as Triton 3.6 allots it: the ring, or the tile on its way
    out."""
    if c.kernel == "tma":
        out_buffers = 4 * 64 * 128
        return c.num_stages * ((TMA_ROWS + c.block_n) * TMA_BYTES + 32) + out_buffers
    stages_in_smem = c.num_stages
    if p.instruction(c, arch) not in ("wgmma", "tcgen05", "mfma"):
        stages_in_smem = max(c.num_stages - 1, 1)
    ring = stages_in_smem * (c.block_m + c.block_n) * c.block_k * p.size
    if p.precision == "tf32x3" and p.dtype == torch.float32:
        ring = max(ring, 2 * c.block_n * c.block_k * 4 + ring // max(stages_in_smem, 1))
    if p.instruction(c, arch) is None:  # a factor on its way to the threads is in float32
        ring = max(ring, max(c.block_m, c.block_n) * c.block_k * 4)
    residual_size = 0 if p.residual is None else p.residual.itemsize
    return max(ring, c.block_m * c.block_n * max(p.out_dtype.itemsize, residual_size))


def violation(c: MatmulConfig, p: Problem, arch: Arch) -> str | None:
    """The reason why a configuration is not allowed, or None."""
    if c.kernel not in KERNELS:
        return f"kernel: want one of {KERNELS}, got {c.kernel!r}"
    min_k = 32 if p.size == 1 else 16
    for name, min_value, max_value in (
        ("block_m", 16, 256), ("block_n", 16, 256), ("block_k", min_k, 512),
        ("num_warps", 1, arch.threads // arch.warp),
    ):  # fmt: skip
        value = getattr(c, name)
        if not isinstance(value, int) or not min_value <= value <= max_value or value & (value - 1):
            return f"{name}: want a power of two from {min_value} to {max_value}, got {value!r}"
    for name, max_value in (("num_stages", 8), ("group_m", 64), ("split_k", MAX_SPLIT_K)):
        value = getattr(c, name)
        if not isinstance(value, int) or not 1 <= value <= max_value:
            return f"{name}: want a number from 1 to {max_value}, got {value!r}"
    if (reason := _tma_objection(c, p, arch)) is not None:
        return reason
    if p.dtype in FP8 and p.dtype not in _fp8_of(arch):
        return f"{arch.name} has no products of {str(p.dtype)[6:]}"
    threads = arch.warp * c.num_warps
    sums = c.block_m * c.block_n // threads
    if sums > 256:  # everything goes through memory
        return f"{sums} float32 sums a thread do not fit its 255 registers"
    unrolled = sums * c.block_k
    if unrolled > 8192 and p.instruction(c, arch) is None:
        return f"without a matrix instruction a thread has {unrolled} multiply-adds one by one"
    shared = shared_bytes(c, p, arch)
    if shared > arch.shared:
        return f"needs {shared} bytes of shared memory, {arch.name} has {arch.shared}"
    return None


def _tma_objection(c: MatmulConfig, p: Problem, arch: Arch) -> str | None:
    if c.kernel != "tma":
        return None
    if not (arch.tma and arch.wgmma):
        return f"{arch.name} has no wgmma with TMA, want sm_90"
    if p.dtype == torch.float32 and p.precision != "tf32":
        return f"wgmma multiplies float32 as tf32, not as {p.precision}"
    if c.split_k > 1:
        return "its programs do not share tiles: want split_k 1"
    if c.block_m != TMA_ROWS or c.num_warps != 8:
        return "two warpgroups of 64 rows each want block_m 128 and num_warps 8"
    if c.block_n < 64:
        return "wgmma wants block_n 64, 128 or 256 here"
    if c.block_k * p.size != TMA_BYTES:
        return f"TMA brings rows of {TMA_BYTES} bytes here: want block_k {TMA_BYTES // p.size}"
    return None


def _fp8_of(arch: Arch) -> tuple[torch.dtype, ...]:
    names = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    return tuple(names[x] for x in arch.dots if x in names)


def check(c: MatmulConfig, p: Problem, arch: Arch) -> None:
    """Raises ValueError if a configuration cannot run on `arch`."""
    reason = violation(c, p, arch)
    if reason is None:
        return
    raise ValueError(f"config: {reason}; {tiles.way_out(closest_legal(c, p, arch))}")


def closest_legal(c: MatmulConfig, p: Problem, arch: Arch) -> MatmulConfig | None:
    """The configuration that works with the fewest halvings and doublings of its sizes."""
    kernels = ("tma", "pointer") if c.kernel == "tma" else ("pointer",)
    sizes = {"kernel": kernels, "num_stages": (1, 2, 3, 4, 5, 6), **SIZES}
    return tiles.closest_legal(c, _changed, lambda near: violation(near, p, arch), sizes)


def _changed(c: MatmulConfig, **sizes: Any) -> MatmulConfig:
    """With what else is out of bounds put back into them."""
    max_value = 1 if sizes["kernel"] == "tma" else MAX_SPLIT_K
    group, split = (x if isinstance(x, int) else 1 for x in (c.group_m, c.split_k))
    return replace(
        c, **sizes, group_m=min(max(group, 1), 64), split_k=min(max(split, 1), max_value)
    )


# block_m, block_n, block_k in bytes, warps, stages; by shared memory and, in float32, precision.
BIG = {2: (128, 256, 128, 8, 3), 1: (128, 128, 128, 4, 3), 4: (128, 128, 128, 8, 3)}
MIDDLE = {2: (128, 128, 128, 8, 3), 1: (128, 128, 128, 4, 3), 4: (128, 64, 128, 8, 3)}
SMALL = {2: (128, 128, 64, 4, 4), 1: (128, 128, 64, 4, 4), 4: (64, 64, 128, 4, 3)}
# by fused multiply-adds: float64, float32 as IEEE has it, and GPUs without tensor cores
PLAIN = MatmulConfig(64, 64, 16, 4, 2)
# Few tiles, with wgmma, alone if they fill the device.
ALONE = {2: (64, 64, 256, 4, 4), 1: (64, 64, 256, 4, 4), 4: (64, 64, 128, 4, 4)}


def choose(p: Problem, arch: Arch, M: int, N: int, K: int, tma: bool) -> MatmulConfig:
    """The default. It depends on M by whether wide tiles fill the device, and by whether there are
    so few that programs share them.

    Args:
        tma: the strides are multiples of 16 bytes and precision and architecture have the kernel.
    """
    if tma and p.swaps:
        M, N = N, M
    tiles_256 = -(-M // TMA_ROWS) * -(-N // 256)
    full = tiles_256 >= arch.units
    if tma:
        # narrow tiles where wide ones are too few
        bn, stages = (256, 4) if full else (128, 6) if N > 64 else (64, 8)
        return MatmulConfig(TMA_ROWS, bn, TMA_BYTES // p.size, 8, stages, kernel="tma")
    plain = p.dtype == torch.float32 and p.precision == "ieee"
    if arch.instruction is None or plain or p.dtype not in (*HALVES, *FP8, torch.float32):
        return PLAIN
    table = BIG if arch.wgmma and full else MIDDLE if arch.shared >= 160 << 10 else SMALL
    if not uses_split_k(arch, M, N, K):
        return _pointer(table, p)
    if not arch.wgmma:
        return _shared(_pointer(table, p), arch, M, N, K)
    alone = _pointer(ALONE, p)
    if (M <= 64 or p.size == 1) and _tiles(alone, M, N) * 10 >= arch.units * 9:
        return alone
    # else programs share wider ones
    return _shared(MatmulConfig(64, 128, 128 // p.size, 4, 4), arch, M, N, K)


def _pointer(table: Mapping[int, tuple[int, ...]], p: Problem) -> MatmulConfig:
    bm, bn, deep, warps, stages = table[p.size]
    return MatmulConfig(bm, bn, deep // p.size, warps, stages)


def _tiles(c: MatmulConfig, M: int, N: int) -> int:
    return -(-M // c.block_m) * -(-N // c.block_n)


def uses_split_k(arch: Arch, M: int, N: int, K: int) -> bool:
    """Whether there are so few tiles, and so much of K, that programs share them."""
    tiles = -(-M // 64) * -(-N // 128)
    # with less of K one program's time is less than that of adding up
    return tiles <= arch.units // 2 and K >= 1024


def _shared(c: MatmulConfig, arch: Arch, M: int, N: int, K: int) -> MatmulConfig:
    """With as many programs a tile as fill the device, each with 4 slices of K or more; or with
    twice as many, of which two fit a multiprocessor, with 16."""
    slices, programs_per_tile = -(-K // c.block_k), arch.units // _tiles(c, M, N)
    once = min(programs_per_tile, slices // 4)
    twice = min(2 * arch.units // _tiles(c, M, N), slices // 16)
    return replace(c, split_k=max(min(max(once, twice), MAX_SPLIT_K), 1))
