"""What bench/tune.py tunes: tables of tiles, calls that take their rows, and what to try."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from slipstream.cli.samples import Sample, Shape, chosen

TRITON = "slipstream.kernels.linear.triton"


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a table, and a call that takes it."""

    name: str
    key: tuple
    op: str
    shape: Shape

    @property
    def sample(self) -> Sample:
        return chosen([self.op])[0]


@dataclasses.dataclass(frozen=True)
class Family:
    """tiles: the module that has TILES. caches: "module:function" that remember its rows.

    candidates: by field; those of "" are several fields at once. forward: fields of kernels that
    forward runs; a candidate for any other is chosen by forward and backward together.
    """

    tiles: str
    caches: tuple[str, ...]
    cases: tuple[Case, ...]
    candidates: Mapping[str, list[Any]]
    forward: tuple[str, ...] = ()

    @property
    def table(self) -> dict:
        return importlib.import_module(self.tiles).TILES

    def forget(self) -> None:
        for path in self.caches:
            module, _, name = path.partition(":")
            getattr(importlib.import_module(module), name).cache_clear()


_WALKS = [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)]
_GRADS = [(64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 1), (128, 8, 2)]
_SOLVE = [(64, 4, 1), (64, 4, 2), (128, 4, 1), (128, 2, 1)]
_ATTENTION = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2)]
_BIG, _WIDE = Shape(B=1, T=8192, H=96), Shape(B=1, T=8192, H=32, grouped=True)
_LONG, _SMALL = Shape(B=1, T=32768, H=8), Shape(B=1, T=8192, H=96, K=64, V=64)

FAMILIES = {
    "delta": Family(
        f"{TRITON}.delta_tiles",
        (f"{TRITON}.delta_plan:_tile",),
        (
            Case("A", ("sm_90", 2, 128), "chunk_delta_rule", _BIG),
            Case("Q1", ("sm_90", 2, 128), "chunk_gated_delta_rule", _WIDE),
            Case("C", ("sm_90", 2, 128), "chunk_gated_delta_rule", _LONG),
            Case("K64", ("sm_90", 2, 64), "chunk_gated_delta_rule", _SMALL),
        ),
        {
            "solve": _SOLVE,
            "walk": _WALKS,
            "crowded_walk": _WALKS,
            "keep": _WALKS,
            "crowded_keep": _WALKS,
            "back": _WALKS,
            "crowded_back": _WALKS,
            "grads": _GRADS,
        },
        ("solve", "walk", "crowded_walk"),
    ),
    "linear": Family(
        f"{TRITON}.tiles",
        (f"{TRITON}.launch:_tile",),
        (
            Case("A", ("sm_90", 2, 128), "chunk_linear_attn", _BIG),
            Case("C", ("sm_90", 2, 128), "chunk_simple_gla", _LONG),
            Case("K64", ("sm_90", 2, 64), "chunk_simple_gla", _SMALL),
        ),
        {"": [{"BX": b, "warps": w, "stages": s} for b, w, s in _WALKS]},
    ),
    "channel": Family(
        f"{TRITON}.channel_tiles",
        (f"{TRITON}.channel_launch:_tile",),
        (Case("gla A", ("sm_90", 2), "chunk_gla", _BIG),),
        {
            "prepare": [(64, 4, 1), (64, 4, 2), (128, 4, 1), (128, 8, 1)],
            "grads": [(64, 4, 1), (64, 4, 2), (64, 8, 1), (128, 8, 1)],
        },
        ("prepare",),
    ),
    "dplr": Family(
        f"{TRITON}.dplr_tiles",
        (f"{TRITON}.dplr_walks:_tile",),
        (
            Case("kda A", ("sm_90", 2, 128), "chunk_kda", _BIG),
            Case("dplr A", ("sm_90", 2, 128), "chunk_dplr_delta_rule", _BIG),
        ),
        {
            "prepare": _SOLVE,
            "walk": _WALKS,
            "keep": _WALKS,
            "back": _WALKS,
            "scores": _GRADS,
            "grads": _GRADS,
        },
        ("prepare", "walk"),
    ),
    "softmax": Family(
        "slipstream.kernels.softmax.triton.tiles",
        (),
        (
            Case("D128", ("sm_90", 2, 128), "attention", Shape(B=4, T=4096, H=16)),
            Case("D64", ("sm_90", 2, 64), "attention", Shape(B=4, T=4096, H=32, K=64, V=64)),
        ),
        dict.fromkeys(("forward", "dq", "dkv"), _ATTENTION),
        ("forward",),
    ),
}
