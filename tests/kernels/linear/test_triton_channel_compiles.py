"""The kernels with a decay per channel compiled for GPUs that need not be there."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.core.aot import Compiled, compile_kernel
from slipstream.core.arch import ARCHS
from slipstream.kernels.linear.triton import channel_tiles, tiles
from slipstream.kernels.linear.triton.plan import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

TYPES = {2: "*bf16", 4: "*fp32"}
# What each launch of channel_launch.py passes besides q, k, v, g: pointers, and flags.
LAUNCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "states": ("states", "final", {}),
    "both": ("states", "do dstates initial dfinal dinitial", {}),
    "read": ("read", "x y", {"BACK": False}),
    "back": ("read", "x y", {"BACK": True}),
    "forward": ("grads", "do dq", {}),
    "grads": ("grads", "do dstates dq dk dg", {}),
}
WIDE = ("final", "initial", "dfinal", "dinitial", "u", "du")


def compile_channel(
    capability: int,
    bytes_each: int,
    K: int,
    V: int,
    launch: str,
    form: str = "g",
    packed: bool = False,
    gates: str | None = None,
    override: channel_tiles.Part | None = None,
) -> Compiled:
    tile = channel_tiles.choose(tiles.family(divmod(capability, 10)), K, V, bytes_each)
    name, more, flags = LAUNCHES[launch]
    part: channel_tiles.Part = override or getattr(tile, name)
    gates = gates or TYPES[bytes_each]
    names = {"k", "states", *more.split()} | (set() if name == "read" else {"v"})
    names |= set() if launch in ("states", "forward") else {"q"}
    if form == "u" and name != "states":
        names |= {"u", "du"} if launch == "grads" else {"u"}
    pointers = {f"{x}_ptr": "*fp32" if x in WIDE else TYPES[bytes_each] for x in names}
    pointers["g_ptr"] = gates
    pointers |= {"dg_ptr": gates} if launch == "grads" else {}
    pointers |= {"cu_ptr": "*i32"} if packed else {}
    flags = {**flags, "K": K, "V": V, "BK": part.BK, "BV": part.BV, "C": tile.C}
    if name == "states":
        flags["TRANSPOSED"] = True
    else:
        flags |= {"LEVELS": tile.C.bit_length() - 1, "BOUND": 60.0 if bytes_each == 2 else 6.0}
    flags |= {"BEFORE": form == "u", "PACKED": packed, "GROUPED": packed}
    flags |= {"PARTS": 3 if bytes_each == 4 else 1 if gates == "*bf16" else 2}
    return compile_kernel(
        f"slipstream.kernels.linear.triton.channel_{name}:channel_{name}_kernel",
        pointers,
        {**flags, "PRECISION": "tf32x3"},
        target=f"sm_{capability}",
        warps=part.warps,
        stages=part.stages,
    )


def check(capability: int, bytes_each: int, *variant: Any) -> None:
    got = compile_channel(capability, bytes_each, *variant)
    assert got.shared <= ARCHS[f"sm_{capability}"].shared
    if capability == 90:
        assert got.instructions["wgmma"]
        assert not got.instructions["mma.sync"]  # what narrow tiles fall back to
    else:
        assert got.instructions["mma.sync"]
    if bytes_each == 2:  # of the gradients' kernel a twelfth of the loop's instructions
        limit = 1280 if variant[2] == "grads" else 384
        assert got.stack <= limit, f"{got.stack} bytes spilled"


def variants() -> Iterator[tuple]:
    for capability in (80, 90):
        for bytes_each in (2, 4):
            for width in (64, 128, 256):
                for launch in LAUNCHES:
                    form = "u" if width == 64 and launch != "forward" else "g"
                    yield capability, bytes_each, width, width, launch, form, width == 64


@pytest.mark.parametrize("launch", ["both", "read", "grads"])
def test_channel_kernels_compile(launch: str):
    check(90, 2, 128, 128, launch)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(variants()), ids=lambda v: "-".join(map(str, v)))
def test_channel_kernels_compile_in_every_variant(variant: tuple):
    check(*variant)


@pytest.mark.slow
@pytest.mark.parametrize(("K", "V"), [(30, 60), (100, 256), (1, 1)])
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_channel_kernels_compile_for_odd_widths(capability: int, K: int, V: int):
    check(capability, 2, K, V, "grads", "u", True, "*fp32")


if __name__ == "__main__":
    for variant in variants():
        if all(x in ("*", str(y)) for x, y in zip(sys.argv[1:], variant)):
            got = compile_channel(*variant)
            counts = {name: n for name, n in got.instructions.items() if n}
            print(*variant, f"{got.seconds:.1f} s,", end=" ")
            print(got.shared, "shared,", got.registers, "registers,", got.stack, "stack", counts)
