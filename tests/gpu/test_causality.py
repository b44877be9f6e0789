"""The past keeps its bits when the future changes, on a CUDA device: every operator with time."""

from dataclasses import replace

import pytest
import torch

from slipstream.tools.catalog import OPERATORS, Sample
from tests.support.causality import CUTS, changed_bits
from tests.support.operators import Size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# what comes before a token is all that these see, and what attention's other rows see is not
AROUND = ("attention", "attention-gated", "short_convolution", "token_shift")
CAUSAL = [x for x in OPERATORS if x.op.startswith(("chunk_", "fused_")) or x.name in AROUND]
# with as many chunks as there are cuts: what Hopper's kernels take, and what they do not
SIZES = {
    "wide": Size(B=1, T=150, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16),
    "half": Size(B=2, T=150, H=1, HV=1, K=64, V=64, dtype=torch.float16),
    "odd": Size(B=1, T=70, H=1, HV=2, K=30, V=60),
}


@pytest.mark.parametrize("impl", [None, "triton"], ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", CAUSAL, ids=lambda op: op.name)
def test_past_keeps_its_bits(op: Sample, size: str, impl: str | None) -> None:
    if impl is not None and "impl" not in op.takes:
        impl = None
    shape = replace(SIZES[size], state=bool(op.states))
    cuts = tuple(cut for cut in (*CUTS, 100) if cut < shape.T)
    # few numbers round otherwise where an intermediate result's last bit changes
    seeds = 0, 1, 2
    found = changed_bits(op, impl, shape, cuts, device=torch.device("cuda"), seeds=seeds)
    assert not found, f"{op.name}, {size}: {found}"
