"""Steps of one token in blocks by impl="triton" under Triton's interpreter: the bits of the block.

The interpreter is chosen when a kernel is defined, so this runs in a process of its own:

TRITON_INTERPRET=1 python -m tests.nn.test_block_step_interpreted
"""

import torch

from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.nn.conv import ShortConvolution
from slipstream.ops import chunk_gated_delta_rule
from slipstream.runtime.block_step import BlockStep
from slipstream.runtime.consistent import consistent
from tests.support.block_inputs import LAYERS, check_inputs
from tests.support.interpreted import run

H, K = 2, 64


def test_steps_have_the_bits_of_blocks() -> None:
    run(script="tests.nn.test_block_step_interpreted")


@torch.no_grad()
def check(N: int) -> None:
    torch.manual_seed(0)
    conv = ShortConvolution(3 * H * K, 4).to(torch.float16)
    x = torch.randn(N, 64, 3 * H * K, dtype=torch.float16)
    g, beta = -torch.rand(N, 64, H), torch.rand(N, 64, H, dtype=torch.float16)
    past = torch.randn(N, 3 * H * K, 4, dtype=torch.float16), torch.randn(N, H, K, K)

    def call(x: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        sizes = (H * K, H * K, H * K)
        (q, k, v, *_), _ = conv.split(x, sizes, past[0], use_cache=True, unit=K)
        q, k, v = (y.unflatten(-1, (H, K)) for y in (q, k, v))
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=past[1])
        return o

    counts = torch.zeros(N, dtype=torch.int64)
    step = BlockStep(counts, place_tokens)
    with consistent():
        want = call(x, g, beta)
        with step.running(fills=True):
            call(torch.randn_like(x), -torch.rand_like(g), torch.rand_like(beta))
        for t in range(6):
            counts.fill_(t)
            with step.running():
                found = call(*(y[:, t : t + 1] for y in (x, g, beta)))
            assert torch.equal(found, want[:, t : t + 1]), t


if __name__ == "__main__":
    check(1)
    check(2)
    for make, bound in LAYERS:
        check_inputs(make(), bound, torch.float16)
