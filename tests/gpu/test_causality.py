"""The past keeps its bits when the future changes, on a CUDA device: every operator with time."""

from dataclasses import replace

import pytest
import torch

from slipstream.tools.catalog import OPERATORS, Sample, flat
from tests.support.causality import CUTS, bits, changed_bits
from tests.support.operators import Size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# what comes before a token is all that these see, and what attention's other rows see is not
AROUND = ("attention", "attention-gated", "short_convolution", "token_shift")
CAUSAL = [x for x in OPERATORS if x.op.startswith(("chunk_", "fused_")) or x.name in AROUND]
# with as many chunks as there are cuts: what Hopper's kernels take, and what they do not
PER_CHANNEL = ("chunk_kda", "chunk_gdn2", "chunk_dplr_delta_rule", "chunk_rwkv7", "chunk_gla")
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


@pytest.mark.parametrize("impl", [None, "triton"], ids=str)
@pytest.mark.parametrize("op", [x for x in CAUSAL if x.name in PER_CHANNEL], ids=lambda op: op.name)
def test_past_of_small_keys_keeps_its_bits(op: Sample, impl: str | None) -> None:
    """Keys times 2^-24, none of whose entries is below 2^-46 but 0, and gates of which halves and
    quarters of 64 tokens decay by up to 2^-160, or will."""
    size = Size(B=1, T=128, H=8, HV=8, K=64, V=64, dtype=torch.bfloat16, gate="weak")
    torch.manual_seed(0)
    args = op.inputs(size, torch.device("cuda"))
    for name in ("k", "b", "beta") if "b" in args else ("k",):
        if name in args:
            small = args[name] * 2.0**-24
            args[name] = torch.where(small.abs() < 2.0**-46, 0.0, small)
    name = next(x for x in ("g", "gk", "w") if x in args)
    shape = args[name].shape
    rand = torch.rand(shape, device="cuda").to(args[name].dtype)
    odd = (torch.arange(128, device="cuda") // 16 % 2 == 1)[None, :, None, None]
    gates = {
        "weak": -0.1 * rand,
        "half": -6.6 * rand,
        "even": -3.4 + 0 * rand,
        "quarters": torch.where(odd, -6.9, -0.1 * rand),
        "strong": -50 * rand,
    }
    found = []
    with torch.no_grad():
        for before, past in gates.items():
            want = flat(op(args | {name: past}, **({"impl": impl} if impl else {})))[0]
            for after, future in gates.items():
                for cut in (12, 28, 44, 100):
                    g = torch.cat([past[:, :cut], future[:, cut:]], 1)
                    got = flat(op(args | {name: g}, **({"impl": impl} if impl else {})))[0]
                    if not torch.equal(bits(want[:, :cut]), bits(got[:, :cut])):
                        found.append((before, after, cut))
    assert not found, f"{op.name}: {found}"
