"""The Triton kernels compiled for GPUs that need not be there: shared memory, tensor cores, spills.

Triton's compiler wants neither torch nor a driver. Its figures hold only if it is told, as the JIT
finds out by itself, that pointers are divisible by 16.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slipstream.kernels.linear.triton import tiles
from slipstream.kernels.linear.triton.plan import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

# Flags of the four walks of walk.py, with what each is given at its most.
WALKS = {
    "forward": {"HAS_S_OUT": True},
    "dq": {"TRANSPOSED": True},
    "dk": {"TRANSPOSED": True, "REVERSE": True},
    "dv": {"REVERSE": True, "HAS_S_OUT": True},
}
TYPES = {2: "*bf16", 4: "*fp32"}


class Compiled(NamedTuple):
    shared: int
    registers: int
    stack: int
    ptx: str


def compile_walk(
    capability: int, bytes_each: int, D: int, X: int, walk: str, gated: bool, packed: bool
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.kernels.linear.triton.walk import linear_walk_kernel

    tile, BD = tiles.choose(tiles.family(divmod(capability, 10)), D, X, bytes_each, gated)
    sums = gated and walk in ("dq", "dk")
    flags = {"HAS_S_OUT": False, "TRANSPOSED": False, "REVERSE": False, **WALKS[walk]}
    flags |= {"HAS_GATE": gated, "HAS_DG": sums, "HAS_S_IN": True, "PACKED": packed}
    flags |= {"D": D, "X": X, "BD": BD, "BX": tile.BX, "C": tile.C, "SPAN": tiles.SPAN}
    flags |= {"GROUPED": packed, "EXACT": bytes_each == 4, "PRECISION": "tf32x3"}
    pointers = {f"{x}_ptr": TYPES[bytes_each] for x in "rwxy"} | {"s_in_ptr": "*fp32"}
    pointers |= {"g_ptr": "*fp32"} if gated else {}
    pointers |= {"s_out_ptr": "*fp32"} if flags["HAS_S_OUT"] else {}
    pointers |= {"cu_ptr": "*i32"} if packed else {}
    if sums:
        pointers |= {"qk_ptr": TYPES[bytes_each]}
        pointers |= {f"{x}_ptr": "*fp32" for x in ("rows", "dg", "anchor")}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(linear_walk_kernel.arg_names):
        if name in pointers:
            signature[name], attributes[i,] = pointers[name], [["tt.divisibility", 16]]
        elif name in flags or name.endswith("_ptr"):
            signature[name], constants[i,] = "constexpr", flags.get(name)
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    compiled: Any = triton.compile(
        ASTSource(linear_walk_kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    registers, stack = resources(compiled.asm["cubin"])
    return Compiled(compiled.metadata.shared, registers, stack, compiled.asm["ptx"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack (spills) a thread, as cuobjdump has them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(tool), "-res-usage", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def check(capability: int, bytes_each: int, D: int, X: int, walk: str, gated: bool, packed: bool):
    got = compile_walk(capability, bytes_each, D, X, walk, gated, packed)
    limit = tiles.SHARED_LIMIT[tiles.family(divmod(capability, 10))]
    assert got.shared <= limit
    if capability == 90:
        assert "wgmma.mma_async" in got.ptx
        assert "mma.sync" not in got.ptx  # what narrow tiles fall back to
    if capability == 80:
        assert "mma.sync" in got.ptx
    if bytes_each == 2:
        # Most of it is outside of the loop; with 128 x 128 on sm_90 27 accesses are not. Odd widths
        # load element by element, through more registers.
        limit = 1024 if D % 2 or X % 2 else 512
        assert got.stack <= limit, f"{got.stack} bytes spilled"


def variants() -> Iterator[tuple]:
    for capability in (80, 90):
        for bytes_each in (2, 4):
            for D in (64, 128, 256):
                for walk in WALKS:
                    for gated in (False, True):
                        yield capability, bytes_each, D, D, walk, gated, D == 64


@pytest.mark.parametrize("walk", ["forward", "dk"])
@pytest.mark.parametrize("capability", [80, 90])
def test_walk_compiles(capability: int, walk: str):
    check(capability, 2, 128, 128, walk, walk == "dk", False)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(map(str, v)))
def test_walk_compiles_in_every_variant(variant: tuple):
    check(*variant)


@pytest.mark.slow
@pytest.mark.parametrize(("D", "X"), [(30, 60), (100, 256), (1, 1)])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_walk_compiles_for_odd_widths(capability: int, D: int, X: int):
    check(capability, 2, D, X, "dk", True, True)
