"""The delta rule's Triton kernels compiled for GPUs that need not be there.

As test_triton_compiles.py.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from slipstream.kernels.linear.triton import delta_tiles, tiles
from slipstream.kernels.linear.triton.plan import HAVE_TRITON
from tests.kernels.linear.test_triton_compiles import TYPES, resources

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

KERNELS = ("solve", "walk", "keep", "back", "grads")
WIDE = ("s_in_ptr", "s_out_ptr", "g_ptr", "rows_ptr", "beta_ptr", "dbeta_ptr", "dg_ptr")


class Compiled(NamedTuple):
    shared: int
    registers: int
    stack: int
    ptx: str


def compile_delta(
    capability: int,
    bytes_each: int,
    K: int,
    V: int,
    kernel: str,
    gated: bool,
    has_p: bool,
    packed: bool,
    override: delta_tiles.Part | None = None,
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.kernels.linear.triton.delta_grads import delta_grads_kernel
    from slipstream.kernels.linear.triton.delta_solve import delta_solve_kernel
    from slipstream.kernels.linear.triton.delta_walk import (
        delta_walk_back_kernel,
        delta_walk_kernel,
    )

    tile, BK = delta_tiles.choose(tiles.family(divmod(capability, 10)), K, V, bytes_each)
    part = override or getattr(tile, kernel)
    fn: Any = {
        "solve": delta_solve_kernel,
        "walk": delta_walk_kernel,
        "keep": delta_walk_kernel,
        "back": delta_walk_back_kernel,
        "grads": delta_grads_kernel,
    }[kernel]
    over_k = kernel in ("solve", "grads")
    flags: dict[str, Any] = {"K": K, "V": V, "C": tile.C, "BK": part.B if over_k else BK}
    flags |= {"BV": min(64, part.B) if kernel == "grads" else part.B, "KEEP": kernel == "keep"}
    flags |= {"HAS_P": has_p, "HAS_GATE": gated, "HAS_S_IN": True, "HAS_S_OUT": True}
    flags |= {"PACKED": packed, "GROUPED": packed, "EXACT": bytes_each == 4}
    flags |= {"PRECISION": "tf32x3", "INNER": "tf32x3" if bytes_each == 4 else "tf32"}
    flags |= {"LEVELS": (tile.C // 16).bit_length() - 1}
    absent = {"cu_ptr"} if not packed else set()
    absent |= set() if gated else {"g_ptr", "dg_ptr"}
    absent |= set() if has_p or kernel == "solve" else {"p_ptr", "dp_ptr"}
    absent |= {"walk": {"x_ptr", "states_ptr"}, "keep": {"q_ptr", "o_ptr", "s_out_ptr"}}.get(
        kernel, set()
    )
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(fn.arg_names):
        if name in flags or name in absent:
            signature[name], constants[i,] = "constexpr", flags.get(name)
        elif name.endswith("_ptr"):
            wide = "*i32" if name == "cu_ptr" else "*fp32" if name in WIDE else TYPES[bytes_each]
            signature[name], attributes[i,] = wide, [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    compiled: Any = triton.compile(
        ASTSource(fn, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": part.warps, "num_stages": part.stages},
    )
    registers, stack = resources(compiled.asm["cubin"])
    return Compiled(compiled.metadata.shared, registers, stack, compiled.asm["ptx"])


def check(capability: int, bytes_each: int, K: int, V: int, kernel: str, *flags: Any) -> Compiled:
    got = compile_delta(capability, bytes_each, K, V, kernel, *flags)
    assert got.shared <= tiles.SHARED_LIMIT[tiles.family(divmod(capability, 10))]
    if capability == 90 and (bytes_each, K) != (4, 256):
        assert "wgmma.mma_async" in got.ptx
        assert "mma.sync" not in got.ptx  # what narrow tiles fall back to
    else:
        assert "mma.sync" in got.ptx
    # Some of it in the loop: the walks of 128 channels want more registers than there are.
    limit = 1280 if bytes_each == 2 else 4096 if K < 256 else 16384
    assert got.stack <= limit, f"{got.stack} bytes spilled"
    return got


def variants() -> Iterator[tuple]:
    for capability in (80, 90):
        for bytes_each in (2, 4):
            for D in (64, 128, 256):
                for kernel in KERNELS:
                    for gated in (False, True):
                        yield capability, bytes_each, D, D, kernel, gated, gated, D == 64


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(map(str, v)))
def test_delta_compiles_in_every_variant(variant: tuple):
    check(*variant)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    for variant in variants():
        if all(str(x) in ("*", str(y)) for x, y in zip(chosen, variant)):
            got = compile_delta(*variant)
            wgmma = got.ptx.count("wgmma.mma_async")
            print(
                *variant,
                "shared",
                got.shared,
                "registers",
                got.registers,
                "stack",
                got.stack,
                "wgmma",
                wgmma,
                "mma.sync",
                got.ptx.count("mma.sync"),
                flush=True,
            )
