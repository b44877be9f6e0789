"""Building blocks by impl="triton" under Triton's interpreter, on a CPU, against their formulas.

What else the kernels of a family have to do is tested in its folder.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.compiler.known_bugs import KernelKey
from slipstream.runtime.guarded_launch import Guard
from slipstream.tools.catalog import Sample
from tests.support.formulas import wanted
from tests.support.interpreted import error, interpreted
from tests.support.operators import BLOCKS, Args, block_size, cast, each, with_grads
from tests.support.user_inputs import LAYOUTS

SIZES = ((1, 6), (7, 12), (37, 30), (0, 6))
# Of the largest value, outputs and gradients; the interpreter cuts 16-bit results off, which is
# twice the error of rounding.
LIMITS = {torch.float32: (1e-5, 3e-5), torch.float16: (4e-3, 8e-3)}
FAMILIES = {
    "attnres": ("attnres",),
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
        fault for block in rows for T, D in SIZES for dtype in (torch.float32, torch.float16)
        if dtype == torch.float32 or T == 7 for fault in check(block, T, D, dtype)
    ]  # fmt: skip
    faults += [
        fault for block in rows for layout in ("stepped", "negated")
        for fault in check(block, 7, 12, torch.float32, layout)
    ]  # fmt: skip
    probed: set[KernelKey] = set()
    faults += [fault for block in rows for fault in refused(block, probed)]
    assert not faults, "\n".join(faults)
