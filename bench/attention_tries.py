"""Tiles and grids of attention's kernels in place of the tables': errors, then TFLOP/s.

python bench/attention_tries.py check GROUP   # compiles them, and compares with float64
python bench/attention_tries.py time GROUP    # taking turns, beside what the plan takes
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from attention_gpu import PLAIN, compare, error, oracle, peer, terms_of
from attention_rows import MIXED, medians, ways
from record import record
from torch.nn.attention import SDPBackend

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.kernels.attention.sm90.tiles import TILES as HOPPER
from slipstream.kernels.attention.sm90.tiles import Tile as HopperTile
from slipstream.kernels.attention.triton import launch_utils, tiles
from slipstream.kernels.attention.triton.tiles import Tile

MIB = 1 << 20
WIDE: dict[str, dict[str, Tile | None]] = {
    "one": {"dq": Tile(128, 64, 8, 1), "dkv": Tile(64, 64, 8, 2), "dv": None},
    "apart 128": {"dkv": Tile(64, 128, 8, 1), "dv": Tile(64, 128, 8, 2)},
    "apart 64 4 2": {"dkv": Tile(64, 64, 4, 2), "dv": Tile(64, 128, 8, 2)},
    "apart 64 8 2": {"dkv": Tile(64, 64, 8, 2), "dv": Tile(64, 128, 8, 2)},
    "apart, dv 1": {"dkv": Tile(64, 128, 8, 1), "dv": Tile(64, 128, 8, 1)},
}
FORWARD: dict[int, dict[str, HopperTile]] = {
    64: {
        "ahead": HopperTile(128, (4, 4), queries=2),
        "plain": HopperTile(128, (4, 4)),
    },
    128: {
        "plain": HopperTile(128, (2, 2)),
        "ahead": HopperTile(128, (2, 2), queries=2),
        "3": HopperTile(128, (3, 3)),
    },
    256: {
        "plain": HopperTile(64, (2, 2)),
        "a unit": HopperTile(64, (2, 2), False),
    },
}
SHAPES = {64: (4, 4096, 32), 128: (4, 4096, 16), 256: (2, 8192, 8)}
ODD: list[dict[str, Any]] = [
    {"B": 4, "H": 16, "HKV": 4, "T": 1100, "S": 700},
    {"B": 4, "H": 16, "HKV": 4, "T": 1100, "S": 1100, "right": 0},
]
FEATURES: list[dict[str, Any]] = [
    {"T": 900, "S": 800, "lengths": (5, 0, 400, 1, 494), "k_lengths": (5, 7, 395, 1, 392),
     "left": 200, "right": 30, "softcap": 20.0, "sinks": True},
    {"B": 3, "H": 16, "HKV": 4, "T": 700, "S": 450, "used": (450, 9, 0), "right": 0},
    {"H": 8, "HKV": 8, "T": 3300, "S": 3300, "lengths": (5, 0, 1400, 1, 1894)},
]  # fmt: skip


@contextmanager
def portable(name: str) -> Iterator[None]:
    key = ("sm_90", 2, 256)
    kept = tiles.TILES[key]
    tiles.TILES[key] = dataclasses.replace(kept, **WIDE[name])
    launch_utils.tiles_of.cache_clear()
    yield
    tiles.TILES[key] = kept
    launch_utils.tiles_of.cache_clear()


@contextmanager
def hopper(D: int, name: str) -> Iterator[None]:
    tile = FORWARD[D][name]
    with mock.patch.dict(HOPPER, {D: HOPPER[D]._replace(forward=tile)}):
        yield


@contextmanager
def fused(section: int, buffers: int, D: int) -> Iterator[None]:
    from slipstream.kernels.attention.sm90 import bwd_fused_launch

    with (
        mock.patch.object(bwd_fused_launch, "MAX_SECTION_BYTES", section * MIB),
        mock.patch.dict(bwd_fused_launch.BUFFERS, {D: buffers}),
    ):
        yield


@contextmanager
def close(section: int) -> Iterator[None]:
    from slipstream.kernels.attention.sm90 import launch

    with mock.patch.object(launch, "CLOSE", section * MIB):
        yield


def variants(group: str) -> dict[str, tuple[int, str, Callable[[], Any]]]:
    """By name: the width of a head, what runs, and what is in place meanwhile."""
    if group == "wide":
        return {name: (256, "portable bwd", partial(portable, name)) for name in WIDE}
    D = int(group[3:])
    if group.startswith("odd"):
        return {"plan": (D, "hopper bwd" if D > 64 else "hopper fwd", nullcontext)}
    if group.startswith(("pac", "win")):
        return {"fused": (D, "hopper bwd", nullcontext)}
    if group.startswith("sec"):
        return {f"close {s}": (D, "hopper fwd", partial(close, s)) for s in (3, 5, 8, 12)}
    if group.startswith("fwd"):
        return {name: (D, "hopper fwd", partial(hopper, D, name)) for name in FORWARD[D]}
    found = {
        f"section {s}": (D, "hopper bwd", partial(fused, s, 3 if D == 64 else 2, D))
        for s in (32, 64, 96, 128, 192, 256, 512)
    }
    if D == 64:
        found["buffers 4"] = (D, "hopper bwd", partial(fused, 32, 4, D))
    return found


def check(group: str) -> None:
    from slipstream.kernels.attention.sm90 import launch

    part, parts = map(int, os.environ.get("PART", "0/1").split("/"))
    for name, (D, what, place) in [*variants(group).items()][part::parts]:
        worst = 0.0
        with place():
            for size in FEATURES if group.startswith("odd") else ODD:
                given = {**PLAIN, "D": D, "DV": D, **size}
                if what.startswith("portable"):
                    found = compare(given, torch.bfloat16)
                else:
                    terms, options = terms_of(given, torch.bfloat16)
                    do = torch.randn_like(terms.q)
                    B, T, H, _ = terms.q.shape
                    dlse = torch.randn(B, H, T, device="cuda")
                    o, lse = launch.forward(terms, options)
                    got = {"o": o, "lse": lse}
                    again = launch.forward(terms, options)
                    assert torch.equal(o, again[0]) and torch.equal(lse, again[1]), name
                    if what.endswith("bwd"):
                        got |= launch.backward(terms, options, o, lse, do, dlse)
                    want = oracle(terms, options, do, dlse)
                    found = {n: error(got[n], want[n]) for n in got}
                worst = max([worst, *found.values()], key=lambda x: (x != x, x))
            if what.endswith("fwd"):
                worst = max([worst, *(growing(D, n) for n in (-1, 1))], key=lambda x: (x != x, x))
        torch.cuda.synchronize()
        print(f"{group} {name}: {worst:.1e}{'' if worst < 8e-3 else ' WRONG'}", flush=True)


def growing(D: int, sign: int) -> float:
    """The worst error where scores grow, or shrink, by far along the keys."""
    from slipstream.kernels.attention.sm90 import launch

    terms, options = terms_of({**PLAIN, "D": D, "DV": D, "T": 300, "S": 1500}, torch.bfloat16)
    ramp = torch.linspace(0.1, 8, 1500, device="cuda")[None, :, None, None] ** sign
    terms = terms._replace(k=(terms.k * ramp).bfloat16())
    o, lse = launch.forward(terms, options)
    want = softmax_reference(AttentionInputs(*(x.double() for x in terms[:3])), options)
    return max(error(o, want[0]), error(lse, want[1]))


def terms_at(shape: tuple[int, int, int], D: int) -> AttentionInputs:
    return AttentionInputs(
        *(torch.randn(*shape, D, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    )


def whole(terms: AttentionInputs, options: AttentionOptions, what: str) -> Callable[[], Any]:
    from slipstream.kernels.attention.sm90 import launch as sm90_backend
    from slipstream.kernels.attention.triton import launch as portable_launch

    module = portable_launch if what.startswith("portable") else sm90_backend
    o, lse = module.forward(terms, options)
    if what.endswith("fwd"):
        return lambda: module.forward(terms, options)
    do = torch.randn_like(o)
    return lambda: module.backward(terms, options, o, lse, do, None)


def within(place: Callable[[], Any], fn: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with place():
            return fn()

    return run


def times(group: str, rounds: int = 6) -> None:
    rows = []
    given = variants(group)
    D, what, _ = next(iter(given.values()))
    for right in (0, -1):
        B, T, H = SHAPES[D]
        terms, options = terms_at((B, T, H), D), AttentionOptions(D**-0.5, -1, right)
        flops = (2.5 if what.endswith("bwd") else 1.0) * 4 * B * H * T * T * D / (right + 2)
        if group.startswith("pac"):
            total, H = sum(MIXED), 16
            cu = torch.tensor([0, *MIXED], device="cuda").cumsum(0).int()
            terms = terms_at((1, total, H), D)._replace(cu_q=cu, cu_k=cu)
            flops = 2.5 * 4 * H * D * sum(x * x for x in MIXED) / (right + 2)
        if group.startswith("win"):  # of 1024 keys
            options = options._replace(left=1023 if right == 0 else 511, right=right and 511)
            flops = 2.5 * 4 * B * H * T * 1024 * D
        fn = whole(terms, options, what)
        fns = {n: within(place, fn) for n, (_, _, place) in given.items()}
        if terms.cu_q is None and not group.startswith("win"):
            run = peer(SDPBackend.CUDNN_ATTENTION, right == 0)
            fns["cudnn"] = ways(run, list(terms[:3]), torch.randn_like(terms.q))[what[-3:]]
        found = medians(fns, rounds)
        row: dict[str, object] = {"group": group, "causal": right == 0}
        row |= {name: round(flops / ms / 1e9) for name, ms in found.items()}
        rows.append(row)
        print(" ".join(f"{n} {x}" for n, x in row.items()), flush=True)
    record("attention_tries", rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in sys.argv[2:]:
        check(each) if sys.argv[1] == "check" else times(each)
