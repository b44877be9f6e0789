"""Attention's Gluon kernels under the emulator: calls and arguments."""

import functools
from typing import Any

import torch

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from tests.gluon_emulator.threads import Descriptor, Pointer, kernel
from tests.support.attention_calls import Call

_PATH = "slipstream.kernels.attention.sm90."

_LN2 = 0.6931471805599453

CALLS = [
    Call("one", T=1, S=1, H=1),
    Call("full", B=2, T=150, S=270, H=2, HKV=2),
    Call("causal", B=2, T=300, S=300, H=4, HKV=2, right=0),
    Call("more queries", T=300, S=90, right=0),
    Call("more keys", T=140, S=400, right=0),
    Call("narrow window", T=300, S=280, left=5, right=3),
    Call("wide window", T=300, S=300, left=150, right=0, softcap=5.0),
    Call("left alone", T=280, S=260, left=100, softcap=3.0),
    Call("packed", T=420, S=420, q_lengths=(5, 0, 200, 215), k_lengths=(5, 0, 200, 215), right=0),
    Call("packed apart", T=210, S=400, q_lengths=(5, 0, 65, 130, 10), k_lengths=(0, 70, 250, 80, 0),
         right=0, left=60),
    Call("used", B=3, T=130, S=300, used=(300, 9, 0), right=0),
    Call("capped, no mask", T=130, S=270, softcap=4.0),
]  # fmt: skip


@functools.cache
def found(name: str) -> Any:
    return kernel(_PATH + name)


def desc(x: torch.Tensor, rows: int, width: int | None = None) -> Descriptor:
    return Descriptor(x.numpy().reshape(-1, x.shape[2] * x.shape[3]), (rows, width or x.shape[3]))


def at(x: torch.Tensor) -> tuple[int, int, int]:
    return x.shape[1], 0, x.shape[3]


def ptr(x: torch.Tensor | None) -> Pointer | None:
    return None if x is None else Pointer(x.numpy().reshape(-1))


def offsets(terms: AttentionInputs) -> tuple:
    return ptr(terms.cu_q), ptr(terms.cu_k), ptr(terms.lengths)


def factors(options: AttentionOptions) -> tuple[float, float]:
    if options.softcap == 0:
        return options.scale / _LN2, 0.0
    return 2 * options.scale / options.softcap / _LN2, options.softcap / _LN2


def sizes(
    terms: AttentionInputs, options: AttentionOptions, of_keys: bool, rows: int = 128
) -> tuple:
    q, k, N = terms.q, terms.k, terms.sequences
    T, S, H, HKV = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    total, cu, heads = (S, terms.cu_k, HKV) if of_keys else (T, terms.cu_q, H)
    tiles = -(-total // rows) if cu is None else total // rows + N
    pairs = heads if cu is not None else heads * N
    left, right = max(options.left, 0), max(options.right, 0)
    steps = (N - 1).bit_length()
    return T, S, H, N, H // HKV, tiles, steps, min(3, pairs), tiles * pairs, left, right


def flags(terms: AttentionInputs, options: AttentionOptions, extra: int = 0) -> dict[str, int]:
    extra |= 64 if terms.sinks is not None else 0
    given = (
        options.left >= 0,
        options.right >= 0,
        options.softcap != 0,
        terms.lengths is not None,
        terms.cu_q is not None,
        terms.cu_k is not None,
    )
    flags = sum(1 << i for i, x in enumerate(given) if x) + extra
    return {"FLAGS": flags, "CONSUMER": 0, "PRODUCER": 0}
