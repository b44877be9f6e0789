"""Triton kernels of per-channel decay, and of free a and b, compiled for GPUs not there.

As test_triton_scalar_decay_compiles.py. As a script, prints what each variant takes; arguments
choose variants.
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.compiler.aot import Compiled, compile_kernel, load
from slipstream.compiler.arch import ARCHS
from slipstream.kernels.linear.triton.delta.tiles import KernelTile
from slipstream.kernels.linear.triton.dplr import tiles as triton_dplr_tiles
from slipstream.kernels.linear.triton.plan import HAVE_TRITON
from slipstream.kernels.linear.triton.scalar_decay import tiles
from tests.support.linear_compiled import TYPES
from tests.support.sass import disassemble
from tests.support.uniform_registers import unwritten

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

MODULES = "slipstream.kernels.linear.triton.dplr."
PATHS = {
    "intra": MODULES + "wy:dplr_wy_kernel",
    "quarters": MODULES + "wy_quarters:dplr_wy_quarters_kernel",
    "strong": MODULES + "intra_safe:dplr_intra_safe_kernel",
    "fwd": MODULES + "chunk:dplr_chunk_fwd_kernel",
    "fwd_states": MODULES + "chunk:dplr_chunk_fwd_kernel",
    "ends": MODULES + "chunk:dplr_chunk_fwd_kernel",
    "dstate": MODULES + "chunk:dplr_chunk_dstate_kernel",
    "dstate_ends": MODULES + "chunk:dplr_chunk_dstate_kernel",
    "scores": MODULES + "scores:dplr_scores_kernel",
    "grads": MODULES + "dqkg:dplr_dqkg_kernel",
    "quarters_grads": MODULES + "dqkg:dplr_dqkg_kernel",
    "strong_grads": MODULES + "intra_safe_bwd:dplr_intra_safe_bwd_kernel",
}
# kernels that take another's tile
OF = {
    "quarters": "intra",
    "strong": "intra",
    "quarters_grads": "grads",
    "strong_grads": "grads",
    "ends": "fwd_states",
    "dstate_ends": "dstate",
}
MAKES = {
    "fwd": "o",
    "fwd_states": "states",
    "dstate": "states",
    "ends": "ends",
    "dstate_ends": "ends",
}
WIDE = ("u", "u_out", "s_in", "s_out", "m", "g", "total", "beta", "dbeta", "dg", "diag")
ONLY = {
    "delta": ("beta", "dbeta"),
    "dplr": ("a", "b", "k_out", "qk", "ak", "dqk", "dak", "da", "db"),
    "gate": ("g", "dg", "total", "ones", "strong"),
}


def compile_dplr(
    capability: int,
    bytes_each: int,
    K: int,
    V: int,
    kernel: str,
    kind: str,
    packed: bool,
    override: KernelTile | None = None,
) -> Compiled:
    """kind: kda, dplr or iplr."""
    family = tiles.family(divmod(capability, 10))
    tile, wide = triton_dplr_tiles.choose(family, K, V, bytes_each, free=kind != "kda")
    part = override or getattr(tile, OF.get(kernel, kernel))
    delta, gated = kind == "kda", kind != "iplr"
    flags: dict[str, Any] = {"K": K, "V": V, "WIDE": wide, "C": tile.C, "STEPS": tile.steps}
    flags |= {"BK": min(64, wide) if kernel == "scores" else part.B, "BV": part.B}
    flags["PIECES"] = 2 if part.B > 32 else 1
    flags["MAX_CHUNKS"] = 16
    ends = kernel in ("ends", "dstate_ends")
    flags |= {"OUTPUT": MAKES.get(kernel), "SPLIT": ends, "DELTA": delta, "HAS_GATE": gated}
    flags |= {"CHANNEL": True, "HAS_S_IN": not ends, "HAS_S_OUT": kernel != "fwd_states"}
    flags["PACKED"] = packed
    dtype = torch.bfloat16 if bytes_each == 2 else torch.float32
    tables = triton_dplr_tiles
    flags |= {"FP32": bytes_each == 4, "LIMIT": tables.ANCHORED_TILES[dtype]}
    flags |= {"SHIFT": tables.SHIFT[dtype], "APART": tables.APART[dtype] if gated else 0.0}
    flags["QUARTERS"] = kernel == "quarters_grads" or (kernel == "strong_grads" and bytes_each == 2)
    inner = "tf32x3" if bytes_each == 4 else "halves" if tile.C == 64 else "tf32"
    flags |= {"PRECISION": "tf32x3", "INNER": inner}
    if _plain(bytes_each, wide, kernel):
        flags["PRECISION"] = "ieee"
    absent = {*ONLY["dplr" if delta else "delta"], *(() if gated else ONLY["gate"])}
    absent |= set() if packed else {"cu"}
    unread = {"q", "qb", "qk", "o"}
    absent |= {
        "fwd": {"states", "x", "m"},
        "fwd_states": {*unread, "s_out", "m"},
        "ends": {*unread, "s_in", "states", "x"},
        "dstate_ends": {"s_in", "r", "y", "states"},
    }.get(kernel, set())
    if kernel in MAKES:
        absent -= {"b"}
        absent |= {"k", "v"} if delta else set()
    if kernel == "scores" and delta:
        absent |= {"k", "dstates"}
    fn = load(PATHS[kernel])
    names = {x for x in fn.arg_names if x.endswith("_ptr") and x[:-4] not in absent}
    ones = "*fp32" if bytes_each == 4 else "*bf16"
    types = {"cu_ptr": "*i32", "strong_ptr": "*i32", "ones_ptr": ones}
    types |= {f"{x}_ptr": "*fp32" for x in WIDE}
    return compile_kernel(
        fn,
        {name: types.get(name, TYPES[bytes_each]) for name in names},
        {name: value for name, value in flags.items() if name in fn.arg_names},
        target=f"sm_{capability}",
        warps=part.warps,
        stages=part.stages,
    )


def _plain(bytes_each: int, wide: int, kernel: str) -> bool:
    """Whether it does without tensor cores."""
    return bytes_each == 4 and wide == 256 and kernel in ("fwd", "dstate", "dstate_ends")


def check(capability: int, bytes_each: int, K: int, V: int, kernel: str, *flags: Any) -> Compiled:
    got = compile_dplr(capability, bytes_each, K, V, kernel, *flags)
    assert got.shared <= ARCHS[f"sm_{capability}"].shared
    if capability == 90 and bytes_each == 2:
        assert "wgmma.mma_async" in got.ptx
        assert "mma.sync" not in got.ptx  # what narrow tiles fall back to
        assert not unwritten(disassemble(got.asm["cubin"]))
    else:
        assert ("mma.sync" in got.ptx) != _plain(bytes_each, K, kernel)
    # grads spills one load in 15; most of what spills more only strong chunks come by
    limit = 2048 if bytes_each == 2 or K < 256 else 16384
    assert got.stack <= limit, f"{got.stack} bytes spilled"
    return got


def variants() -> Iterator[tuple]:
    for capability in (80, 90):
        for bytes_each in (2, 4):
            for D in (64, 128, 256):
                for kernel in PATHS:
                    if kernel in ("ends", "dstate_ends") and D > 128:
                        continue  # not split
                    for kind in ("kda", "dplr", "iplr"):
                        if kernel.startswith("quarters") and bytes_each == 4:
                            continue  # bfloat16 alone takes chunks so
                        if kind != "iplr" or (D == 64 and kernel not in OF):
                            yield capability, bytes_each, D, D, kernel, kind, D == 64


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(map(str, v)))
def test_dplr_compiles_in_every_variant(variant: tuple):
    check(*variant)


@pytest.mark.parametrize("K", [16, 24])
def test_quarters_of_narrow_heads_compile_for_sm_100(K: int) -> None:
    """Triton 3.6 fails where scores of a branch go on into one of its own (InsertTmemAref)."""
    compile_dplr(100, 2, K, K, "quarters", "kda", True)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for variant in variants():
        if all(str(x) in ("*", str(y)) for x, y in zip(chosen, variant)):
            got = compile_dplr(*variant)
            print(
                *variant,
                f"shared {got.shared} registers {got.registers} stack {got.stack}",
                f"wgmma {got.instructions['wgmma']} mma.sync {got.instructions['mma.sync']}",
                f"{got.seconds:.1f} s",
                flush=True,
            )
