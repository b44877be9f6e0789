"""A NaN in an input reaches whatever depends on it, under Triton's interpreter.

tests/support/quick_interpreter.py makes maximum and minimum drop NaN there, as they do on a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.tools.catalog import OPERATORS, Sample
from tests.support.formulas import has_formula, wanted
from tests.support.interpreted import PARTS, interpreted
from tests.support.operators import LINEAR, Args, Size, block_size, cast, each, with_grads

# of the linear family, one of each kernel; the others, other gates and variants are further
SAMPLE = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_kda", "chunk_rwkv4")
ROWS = [x for x in OPERATORS if not x.random and x.variant != "heads"]
# of which impl="triton" has no backward
WITHOUT_GRADIENTS = (
    "flash_attn_with_kvcache", "latent_attention", "short_convolution_update", "recurrent_step",
)  # fmt: skip


def results(call: Callable[[Args], list[Tensor]], row: Sample, args: Args) -> list[Tensor]:
    """Outputs, and gradients where there are some; of copies: some calls write into their input."""
    args = {name: each(Tensor.clone, x) for name, x in args.items()}
    if row.op in WITHOUT_GRADIENTS or set(row.fixed.split()) >= set(args):
        return call(args)
    return [x for some in with_grads(call, args) for x in some]


def plain(row: Sample, args: Args) -> list[Tensor]:
    if row.tested and has_formula(row):
        return results(partial(wanted, row), row, cast(args, torch.float64))
    if row in LINEAR:
        return results(partial(row.call, impl="reference"), row, cast(args, torch.float64))
    return results(partial(row.call, impl="eager"), row, args)


def numbers(args: Args) -> Iterator[tuple[str, Tensor]]:
    """Each floating tensor's element that is a NaN in turn."""
    for name, x in args.items():
        for i, y in enumerate(x if isinstance(x, tuple) else (x,)):
            if y.is_floating_point() and y.numel() > 0:
                yield f"{name} {i}", y.view(-1)[y.numel() // 3]


def lost(row: Sample, args: Args) -> list[str]:
    found = []
    for name, x in numbers(args):
        number, seen = x.item(), []
        for other in (number, number / 2, -number):
            x.fill_(other)
            seen.append(plain(row, args))
        x.fill_(torch.nan)
        got = results(partial(row.call, impl="triton"), row, args)
        x.fill_(number)
        for i, (y, a, b, c) in enumerate(zip(got, *seen, strict=True)):
            depends = (a != b) | (a != c)
            if count := int((depends & y.isfinite()).sum()):
                found.append(f"{row.name}: {name}: {count} numbers of result {i}")
    return found


def check(part: str) -> None:
    faults = []
    for row in ROWS:
        linear = row.op.startswith(("chunk_", "fused_recurrent_"))
        if (part == "sample") != (row.name in SAMPLE or not (linear or row.variant)):
            continue
        for gate in ("weak", "strong", "mixed")[: 1 if part == "sample" else 3]:
            size = (
                Size(B=1, T=40, H=1, HV=1, K=16, V=16, gate=gate) if linear else block_size(7, 12)
            )
            if row.op == "rwkv7_step":  # whose channels are those of its heads
                size = replace(size, D=size.H * size.V)
            faults += lost(row, row.inputs(size))
        print(row.name, flush=True)
    assert not faults, "\n".join(faults)


def check_apart(part: str) -> None:
    """With halves of chunks apart, as bfloat16 has them."""
    from slipstream.kernels.linear.triton.dplr import tiles
    from slipstream.kernels.linear.triton.vector_decay import backend

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiles.APART, torch.float32, 11.0)
        for table, value in ((backend.APART, 55.0), (backend.SHIFT, 60.0), (backend.BOUND, 60.0)):
            patch.setitem(table, torch.float32, value)
        check(part)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_nan_reaches_results_interpreted(part: str) -> None:
    with np.errstate(all="ignore"):
        check_apart(part)
        if part == "further":
            check(part)
