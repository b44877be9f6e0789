"""Tables of tiles, with calls of the catalogue that take their rows and numbers to try in them.

bench/tune.py times them; tests/test_tune.py holds the tables against what it recorded.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slipstream.tools.catalog import Sample, Shape, chosen

TRITON = "slipstream.kernels.linear.triton"
# By field, the numbers to try; of "" those of several fields at once, of JOINT.
Candidates = Mapping[str, list[tuple[int, ...]]]
JOINT = ("BX", "warps", "stages")


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

    @property
    def odd(self) -> Shape:
        """Another shape that takes the row, with blocks that are not whole."""
        return dataclasses.replace(self.shape, B=1, T=333)


@dataclasses.dataclass(frozen=True)
class Family:
    """tiles: the module that has the table, by name. caches: "module:function" that remember rows.

    candidates: those of a key. forward: fields of kernels that forward runs; a candidate for any
    other is chosen by forward and backward together.
    """

    tiles: str
    caches: tuple[str, ...]
    cases: tuple[Case, ...]
    candidates: Callable[[tuple], Candidates]
    forward: tuple[str, ...] = ()
    name: str = "TILES"

    @property
    def table(self) -> dict:
        return getattr(importlib.import_module(self.tiles), self.name)

    def forget(self) -> None:
        for path in self.caches:
            module, _, name = path.partition(":")
            getattr(importlib.import_module(module), name).cache_clear()


def _state_tiles(key: tuple) -> list[tuple[int, ...]]:
    """Columns a program, warps, stages. What has no room is left out later
    (compiler/tile_limits.py)."""
    _, size, width = key
    if size == 4:
        return [(64, 4, 1), (64, 8, 1)]
    if width == 256:
        return [(64, 4, 1), (64, 8, 1), (64, 8, 2)]
    return [(64, 4, 1), (64, 4, 2), (64, 4, 3), (128, 8, 2)]


def _state_only(key: tuple) -> Candidates:
    return {"": _state_tiles(key)}


_SOLVE = [(64, 4, 1), (64, 4, 2), (128, 4, 1)]
_GRADS = [(64, 4, 1), (64, 4, 2), (64, 8, 2)]


def _delta(key: tuple) -> Candidates:
    names = (
        "fwd",
        "fwd_states",
        "dstate",
        "oversubscribed_fwd",
        "oversubscribed_fwd_states",
        "oversubscribed_dstate",
    )
    return {"solve": _SOLVE, **dict.fromkeys(names, _state_tiles(key)), "grads": _GRADS}


def _channel(key: tuple) -> Candidates:
    parts = [(64, 4, 1), (64, 4, 2), (64, 4, 3), (64, 8, 1)]
    return {"prepare": parts, "grads": parts[:2] + parts[3:]}


def _dplr(key: tuple) -> Candidates:
    scans = dict.fromkeys(("fwd", "fwd_states", "dstate"), _state_tiles(key))
    return {"intra": _SOLVE[:2], **scans, "scores": _GRADS[:2], "grads": _GRADS[:2]}


def _attention(key: tuple) -> Candidates:
    """Queries, keys, warps, stages."""
    _, size, width = key
    if size == 4:
        few = [(64, 64, 4, 2), (64, 64, 8, 1), (64, 64, 8, 2)]
        return dict.fromkeys(("forward", "dq", "dkv"), few)
    stages = (1, 2) if width == 256 else (2, 3)
    wide = [(128, 64, 8, n) for n in stages]
    narrow = [(64, 64, 4, n) for n in stages]
    return {
        "forward": [*wide, *narrow],
        "dq": [*wide, *narrow],
        "dkv": [(64, 128, 8, stages[0]), *narrow],
    }


def _shape(width: int, H: int = 96, T: int = 8192, **more: Any) -> Shape:
    return Shape(B=1, T=T, H=H, K=width, V=width, **more)


def _float32(width: int) -> Shape:
    return _shape(width, H=32, T=4096, dtype=torch.float32)


_BIG, _WIDE = _shape(128), _shape(128, H=32, grouped=True)
_LONG, _256 = _shape(128, H=8, T=32768), _shape(256, H=32)


def _key(size: int, width: int) -> tuple:
    return ("sm_90", size, width)


FAMILIES = {
    "linear": Family(
        f"{TRITON}.scalar_decay.tiles",
        (f"{TRITON}.scalar_decay.backend:_tile", f"{TRITON}.vector_decay.launch:_chunk_tile"),
        (
            Case("A", _key(2, 128), "chunk_linear_attn", _BIG),
            Case("C", _key(2, 128), "chunk_simple_gla", _LONG),
            Case("K64", _key(2, 64), "chunk_simple_gla", _shape(64)),
            Case("K256", _key(2, 256), "chunk_simple_gla", _256),
            *(
                Case(f"K{w} fp32", _key(4, w), "chunk_simple_gla", _float32(w))
                for w in (64, 128, 256)
            ),
        ),
        _state_only,
    ),
    "delta": Family(
        f"{TRITON}.delta.tiles",
        (f"{TRITON}.delta.plan:_tile",),
        (
            Case("A", _key(2, 128), "chunk_delta_rule", _BIG),
            Case("Q1", _key(2, 128), "chunk_gated_delta_rule", _WIDE),
            Case("K64", _key(2, 64), "chunk_gated_delta_rule", _shape(64)),
            Case("K256", _key(2, 256), "chunk_gated_delta_rule", _256),
            Case("K64 fp32", _key(4, 64), "chunk_gated_delta_rule", _float32(64)),
            Case("K128 fp32", _key(4, 64), "chunk_gated_delta_rule", _float32(128)),
        ),
        _delta,
        ("solve", "fwd", "oversubscribed_fwd"),
    ),
    "channel": Family(
        f"{TRITON}.vector_decay.tiles",
        (f"{TRITON}.vector_decay.backend:_tile",),
        (
            Case("A", ("sm_90", 2), "chunk_gla", _BIG),
            Case("K64", ("sm_90", 2), "chunk_gla", _shape(64)),
            Case("K256", ("sm_90", 2), "chunk_gla", _256),
            Case("K128 fp32", ("sm_90", 4), "chunk_gla", _float32(128)),
        ),
        _channel,
        ("prepare",),
    ),
    "channel_walks": Family(
        f"{TRITON}.vector_decay.tiles",
        (f"{TRITON}.vector_decay.launch:_chunk_tile",),
        (Case("A", _key(2, 128), "chunk_gla", _BIG),),
        _state_only,
        name="CHUNK_TILES",
    ),
    "dplr": Family(
        f"{TRITON}.dplr.tiles",
        (f"{TRITON}.dplr.launch:_tile",),
        (
            Case("kda A", _key(2, 128), "chunk_kda", _BIG),
            Case("dplr A", _key(2, 128), "chunk_dplr_delta_rule", _BIG),
            Case("kda K64", _key(2, 64), "chunk_kda", _shape(64)),
            Case("kda K256", _key(2, 256), "chunk_kda", _256),
            Case("dplr K256", _key(2, 256), "chunk_dplr_delta_rule", _256),
        ),
        _dplr,
        ("intra", "fwd"),
    ),
    "softmax": Family(
        "slipstream.kernels.attention.triton.tiles",
        ("slipstream.kernels.attention.triton.launch_utils:tiles_of",),
        (
            Case("D128", ("sm_90", 2, 128), "attention", Shape(B=4, T=4096, H=16)),
            Case("D64", ("sm_90", 2, 64), "attention", Shape(B=4, T=4096, H=32, K=64, V=64)),
            Case("D256", ("sm_90", 2, 256), "attention", Shape(B=2, T=4096, H=8, K=256, V=256)),
            Case("D64 fp32", ("sm_90", 4, 64), "attention", _float32(64)),
            Case("D128 fp32", ("sm_90", 4, 128), "attention", _float32(128)),
        ),
        _attention,
        ("forward",),
    ),
}
