"""Inputs of per-channel decay's Gluon kernels for the emulator, and what the first two make."""

import functools
import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from slipstream.kernels.linear.inputs import LinearInputs
from tests.gluon_emulator import linear as emulator
from tests.gluon_emulator import threads

C = 64
PARTS = "slipstream.kernels.linear.sm90."
# T, H, HV, K, V, batch or lengths of packed sequences, delta, gated, erase and write by channel
CASES: dict[str, Any] = {
    "kda": (150, 1, 2, 128, 64, 2, True, True),
    "kda_packed": (290, 1, 1, 64, 128, (5, 0, 200, 1, 64), True, True),
    "dplr": (150, 1, 2, 64, 64, 1, False, True),
    "dplr_packed": (140, 1, 1, 128, 64, (5, 0, 70, 1), False, True),
    "iplr": (70, 1, 1, 64, 64, 1, False, False),
    "gdn2": (150, 1, 2, 128, 64, 2, True, True, True),
    "gdn2_packed": (140, 1, 2, 64, 128, (5, 0, 70, 1), True, True, True),
}


@functools.cache
def kernels_in_float64() -> SimpleNamespace:
    """Of the emulator: weak, of chunks that are not strong, strong, scan and back."""
    language = threads._language()
    vars(language).update(
        sqrt=np.sqrt,
        cast=lambda x, dtype: threads.tensor(x),
        associative_scan=lambda x, axis, add: threads.tensor(np.cumsum(x, axis)),
    )
    with mock.patch.object(threads, "_language", return_value=language), emulator.emulated():
        own = ("wy", "by_quarters", "solve_tril", "blocks", "intra_safe")
        own = (*own, "chunk_fwd", "chunk_dstate")
        names = ["common.tril_inverse", *(f"dplr.{name}" for name in own)]
        made = {name: importlib.import_module(PARTS + name) for name in names}
        vars(made["common.tril_inverse"])["halves"] = emulator.halves
        for module in made.values():
            for name in ("exp2_by_parts", "exp2_or_least", "exp2_of_whole"):  # bits of float32
                if hasattr(module, name):
                    setattr(module, name, language.exp2)
        exp2 = language.exp2
        vars(made["dplr.wy"])["exp2_and_inverse"] = lambda b: (exp2(b), exp2(-b))
        return SimpleNamespace(
            weak=made["dplr.wy"].dplr_wy_sm90_kernel,
            strong=made["dplr.intra_safe"].dplr_intra_safe_sm90_kernel,
            scan=made["dplr.chunk_fwd"].dplr_chunk_fwd_sm90_kernel,
            back=made["dplr.chunk_dstate"].dplr_chunk_dstate_sm90_kernel,
        )


def inputs(case: tuple, gates: Any = None, seed: int = 0) -> LinearInputs:
    """Past the last sequence of packed ones is NaN."""
    T, H, HV, K, V, batch, of_delta, gated, *by_channel = case
    lengths: Any = batch if isinstance(batch, tuple) else None
    B: Any = 1 if lengths else batch
    torch.manual_seed(seed)
    make: dict[str, Any] = {"dtype": torch.float64}
    unit = torch.nn.functional.normalize
    k, a = (unit(torch.randn(B, T, H, K, **make), dim=-1) for _ in range(2))
    terms = LinearInputs(
        torch.randn(B, T, H, K, **make),
        k,
        torch.randn(B, T, HV, V, **make),
        g=(gates or torch.neg)(torch.rand(B, T, HV, K, **make)) if gated else None,
        beta=2 * torch.rand(B, T, HV, **make) if of_delta and not by_channel else None,
        erase=2 * torch.rand(B, T, HV, K, **make) if by_channel else None,
        write=torch.rand(B, T, HV, V, **make) if by_channel else None,
        a=None if of_delta else a,
        b=None if of_delta else -a * torch.rand(B, T, H, 1, **make),
        initial_state=torch.randn(len(lengths), HV, K, V, **make) if lengths else None,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int() if lengths else None,
    )
    for x in terms._replace(initial_state=None) if lengths else ():
        if x is not None and x.is_floating_point():
            x[:, sum(lengths) :] = torch.nan
    return terms


def prepared(
    terms: LinearInputs,
    keep: bool,
    kernels: SimpleNamespace,
    limits: tuple[float, float] = (80.0, 55.0),
) -> dict[str, Any]:
    """The outputs of the kernels, weak and strong. limits: LIMIT and APART, those of bfloat16."""
    B, T, HV, V = terms.v.shape
    H, K = terms.q.shape[2:]
    N = terms.sequences
    of_delta, gated = terms.transition == "delta", terms.g is not None
    slots = B * -(-T // C) if terms.cu_seqlens is None else T // C + N
    empty = functools.partial(torch.full, fill_value=torch.nan, dtype=torch.float64)
    shapes: dict[str, Any] = dict.fromkeys("qwbk", (C, K))
    shapes |= {"u": (V, C), "total": (K,), "qb": (C, C), "qk": (C, C)}
    shapes |= {"ak": (C, C), "r": (C, C), "strong": ()}
    absent = {"k", "qk", "ak"} if of_delta else set()
    absent |= set() if gated else {"total", "strong"}
    made = {n: None if n in absent else empty((slots, HV, *s)) for n, s in shapes.items()}
    b, heads = (terms.b, H) if terms.erase is None else (terms.erase, HV)
    given = (terms.q, terms.k, terms.a, b, terms.v, terms.write, terms.g, terms.beta)
    widths = (H * K, H * K, H * K, heads * K)
    pairs = zip(given, widths)
    tiles = [None if x is None else emulator.Descriptor(x, n, C, 64) for x, n in pairs]
    rest = (*given[4:], *made.values())
    tensors = [*tiles, *(None if x is None else emulator.Pointer(x) for x in rest)]
    cu = None if terms.cu_seqlens is None else emulator.Pointer(terms.cu_seqlens)
    of_all = {"K": K, "V": V, "DELTA": of_delta, "CHANNEL": True}
    of_all |= {"PACKED": cu is not None, "LIMIT": limits[0], "APART": limits[1] * gated}
    sizes = T, N, HV, H, terms.row_heads
    args = (*tensors, cu, 0.3, int(keep), *sizes)
    with np.errstate(all="ignore"):  # of strong chunks
        threads.launch(kernels.weak, slots * HV, args, **of_all, C=C, HAS_GATE=gated)
    if gated:
        tensors[:4] = [None if x is None else emulator.Pointer(x) for x in given[:4]]
        args = (*tensors, cu, 0.3, int(keep), slots * HV, *sizes)
        threads.launch(kernels.strong, 2, args, **of_all)
    return made
