"""Bits of the past where halves of a chunk are apart and inputs small: Triton kernels, interpreted.

The interpreter has no bfloat16, which alone takes chunks so. float32 has its exponents, and is
given its limits here. As test_triton_scalar_decay_interpreted.py: in a process of its own.
"""

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear.triton.plan import HAVE_TRITON
from tests.support.interpreted import run

CALLS = {
    "kda": lambda q, k, v, g, unit: ops.chunk_kda(
        q=q, k=unit, v=v, g=g, beta=q[..., 0].sigmoid(), impl="triton"
    ),
    "dplr": lambda q, k, v, g, unit: ops.chunk_dplr_delta_rule(
        q=q, k=k, v=v, a=-unit, b=unit * q.sigmoid(), gk=g, impl="triton"
    ),
    "gla": lambda q, k, v, g, unit: ops.chunk_gla(q=q, k=k, v=v, g=g, impl="triton"),
    "rwkv6": lambda q, k, v, g, unit: ops.chunk_rwkv6(r=q, k=k, v=v, w=g, u=v[0, 0], impl="triton"),
    "gsa": lambda q, k, v, g, unit: ops.chunk_gsa(q=q, k=k, v=v, s=unit, g=g, impl="triton"),
}
D, T = 16, 64
# within the first half of a chunk of 16 and 32 tokens, and the second
CUTS = (3, 12, 36, 52)


def as_in_bfloat16() -> None:
    from slipstream.kernels.linear.triton.dplr import backend as dplr_backend
    from slipstream.kernels.linear.triton.dplr import launch, tiles
    from slipstream.kernels.linear.triton.vector_decay import backend

    tables = [backend.BOUND, backend.SHIFT, backend.APART]
    for module in (tiles, launch, dplr_backend):
        names = ("ANCHORED_TILES", "SHIFT", "APART")
        tables += [getattr(module, name) for name in names if hasattr(module, name)]
    for table in tables:
        table[torch.float32] = table[torch.bfloat16]


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v, unit = (torch.randn(1, T, 1, D) for _ in range(4))
    unit = torch.nn.functional.normalize(unit, dim=-1)
    # keys that lose digits where decays are 2^-110, and values that show it
    small = torch.where(torch.arange(T) % 3 == 0, 2.0**-20, 1.0)[None, :, None, None]
    k, unit, v = k * small, unit * small, v / small
    return q, k, v, -0.1 * torch.rand(1, T, 1, D), unit


def check(name: str) -> None:
    q, k, v, g, unit = inputs()
    for strong in (-20.0, -5.0, -200.0):
        before = CALLS[name](q, k, v, g, unit)[0]
        for cut in CUTS:
            future = torch.cat([g[:, :cut], strong * torch.rand_like(g[:, cut:])], 1)
            after = CALLS[name](q, k, v, future, unit)[0]
            assert torch.equal(before[:, :cut], after[:, :cut]), (name, strong, cut)
    print(name, "ok", flush=True)


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_small_inputs_keep_their_bits() -> None:
    run(script="tests.kernels.linear.test_halves_interpreted")


if __name__ == "__main__":
    as_in_bfloat16()
    for name in CALLS:
        check(name)
