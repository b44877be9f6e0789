"""Building blocks by impl="triton" under Triton's interpreter, on a CPU, against their formulas;
and a NaN in an input reaches whatever depends on it (tests/support/quick_interpreter.py drops NaN
in maximum and minimum, as a GPU does). What else a family's kernels have to do is tested in its
folder."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.compiler.known_bugs import KernelKey
from slipstream.runtime.guarded_launch import Guard
from slipstream.tools.catalog import OPERATORS, Sample
from tests.support.formulas import has_formula, wanted
from tests.support.interpreted import PARTS, error, interpreted
from tests.support.operators import BLOCKS, LINEAR, Args, Size, block_size, cast, each, with_grads
from tests.support.user_inputs import LAYOUTS

SIZES = ((1, 6), (7, 12), (37, 30), (0, 6))
# Of the largest value, outputs and gradients; the interpreter cuts 16-bit results off, which is
# twice the error of rounding.
LIMITS = {torch.float32: (1e-5, 3e-5), torch.float16: (4e-3, 8e-3)}
FAMILIES = {
    "attnres": ("attnres",),
    "hyper_connection": ("mhc_pre", "mhc_post"),
    "conv": ("short_convolution",),
    "loss": ("cross_entropy", "linear_cross_entropy"),
    "norm": ("rms_norm", "layer_norm", "l2_norm", "group_norm", "rms_norm_gated"),
    "glu": ("swiglu", "geglu", "sigmoid_glu", "squared_relu", "glu_linear"),
    "pointwise": ("rotary_embedding", "token_shift"),
}


def check(block: Sample, T: int, D: int, dtype: torch.dtype, layout: str = "") -> list[str]:
    """layout: of every floating tensor, parameters too, as tests/support/user_inputs.py has it."""
    args = block.inputs(block_size(T, D, dtype))

    def call(given: Args) -> list[Tensor]:
        view = partial(each, lambda x: LAYOUTS[layout](x) if x.is_floating_point() else x)
        return block.call(
            {n: view(x) for n, x in given.items()} if layout else given, impl="triton"
        )

    found = with_grads(call, args)
    right = with_grads(partial(wanted, block), cast(args, torch.float64))
    return [
        f"{block.name} {T, D} {dtype} {layout} {what} {i}: {e:.1e} > {limit:.1e}"
        for what, limit, got, want in zip(("output", "gradient"), LIMITS[dtype], found, right)
        for i, (x, y) in enumerate(zip(got, want, strict=True))
        if not (e := error(x, y)) <= limit
    ]


def refused(block: Sample, probed: set[KernelKey]) -> list[str]:
    """The verdicts of the probes of its calls: any call may be the first of its kind. Those of
    kinds in `probed`, which are added to it, are known."""
    found: list[str] = []
    entered, probing = Guard.__enter__, False

    def enter(guard: Guard) -> bool:
        nonlocal probing
        if guard._probe is not None and not probing and (kind := guard._kind_of()) not in probed:
            probing = True
            probed.add(kind)
            try:
                text = guard._probe()
            finally:
                probing = False
            found.extend([] if text is None else [f"{block.name}: its probe says {text}"])
        return entered(guard)

    args = block.inputs(block_size(7, 12, torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "__enter__", enter)
        with_grads(lambda given: block.call(given, impl="triton"), args)
    return found


@interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_match_formulas_interpreted(family: str) -> None:
    rows = [block for block in BLOCKS if block.op in FAMILIES[family]]
    assert {block.op for block in rows} == {*FAMILIES[family]}
    faults = [
        fault
        for block in rows
        for T, D in SIZES
        for dtype in (torch.float32, torch.float16)
        if dtype == torch.float32 or T == 7
        for fault in check(block, T, D, dtype)
    ]
    faults += [
        fault
        for block in rows
        for layout in ("stepped", "negated")
        for fault in check(block, 7, 12, torch.float32, layout)
    ]
    probed: set[KernelKey] = set()
    faults += [fault for block in rows for fault in refused(block, probed)]
    assert not faults, "\n".join(faults)


# of the linear family, one of each kernel; the others, other gates and variants are further
SAMPLE = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_kda", "chunk_rwkv4")
ROWS = [x for x in OPERATORS if not x.random and x.variant != "heads"]
# of which impl="triton" has no backward
WITHOUT_GRADIENTS = (
    "flash_attn_with_kvcache",
    "latent_attention",
    "short_convolution_update",
    "recurrent_step",
)


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


def check_nan(part: str) -> None:
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
    assert not faults, "\n".join(faults)


def check_apart(part: str) -> None:
    """With halves of chunks apart, as bfloat16 has them."""
    from slipstream.kernels.linear.triton.dplr import tiles
    from slipstream.kernels.linear.triton.vector_decay import backend

    with pytest.MonkeyPatch.context() as patch:
        apart = tiles.RANGES[torch.float32]._replace(apart=11.0)
        patch.setitem(tiles.RANGES, torch.float32, apart)
        patch.setitem(backend.RANGES, torch.float32, backend.RANGES[torch.bfloat16])
        check_nan(part)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_nan_reaches_results_interpreted(part: str) -> None:
    with np.errstate(all="ignore"):
        check_apart(part)
        if part == "further":
            check_nan(part)
