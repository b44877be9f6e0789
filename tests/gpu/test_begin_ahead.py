"""Launches that begin before the one in front has ended give the bits of launches one by one."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slipstream.ops import mixer_step, projection_step, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
H, K = 2, 128


def chain(
    rows: int, dtype: torch.dtype, device: str, between: Callable[[], object]
) -> tuple[list[Tensor], Callable[[], list[Tensor]]]:
    """States, and twelve rounds in which each call reads what the one in front wrote: a norm, a
    product, two steps on one state, and a product with a weight that was made just before."""
    torch.manual_seed(0)
    D = H * K
    x = torch.randn(rows, D, device=device).to(dtype)
    wide, narrow, square = (
        (torch.randn(n, m, device=device) / m**0.5).to(dtype)
        for n, m in ((3 * D, D), (D, 4 * D), (D, D))
    )
    states = [torch.randn(rows, H, K, K, device=device) for _ in range(2)]
    eye = torch.eye(D, device=device).to(dtype)

    def run() -> list[Tensor]:
        h, found = x, []
        for n in range(12):
            y = rms_norm(h)
            between()
            q, k, v = projection_step(y, [wide]).view(rows, 1, 3, H, K).unbind(2)
            between()
            o = []
            for key in (k, F.normalize(k, dim=-1)):
                o.append(mixer_step(q, key, v, state=states[n % 2]))
                between()
            weight = projection_step(square[: min(D, 64)], [eye]).repeat(D // min(D, 64), 1)
            made = projection_step(eye[: min(D, 64)], [weight])
            between()
            both = torch.cat([o[0].view(rows, D), o[1].view(rows, D), y, h], 1)
            h = projection_step(both, [narrow], residual=h)
            between()
            found += [h, made, *o]
        return found

    return states, run


def on_another_stream() -> None:
    """A kernel that the next launch waits for beside the one in front."""
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    with torch.cuda.stream(other):
        torch.ones(1000, device="cuda")
    here.wait_stream(other)


BETWEEN: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a kernel of torch": lambda: torch.ones(1000, device="cuda"),
    "another stream": on_another_stream,
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, torch.bfloat16), (1, torch.float32), (3, torch.float32), (64, torch.bfloat16)],
)
@torch.no_grad()
def test_chain_has_the_bits_of_calls_one_by_one(
    rows: int, dtype: torch.dtype, between: str
) -> None:
    states, run = chain(rows, dtype, "cuda", torch.cuda.synchronize)
    begin = [state.clone() for state in states]
    want = [*run(), *(state.clone() for state in states)]
    states, run = chain(rows, dtype, "cuda", BETWEEN[between])

    def back() -> None:
        for state, first in zip(states, begin):
            state.copy_(first)

    for _ in range(10):
        back()
        got = [*run(), *states]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    back()
    with torch.cuda.graph(graph):
        made = run()
    for _ in range(10):
        back()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip([*made, *states], want, strict=True))


@triton.jit
def user_kernel(early_ptr, late_ptr, out_ptr, size, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    early = tl.load(early_ptr + o, mask=o < size)
    tl.extra.cuda.gdc_wait()
    tl.store(out_ptr + o, early + tl.load(late_ptr), mask=o < size)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="launches begin ahead from sm_90 on",
)
@torch.no_grad()
def test_user_kernel_begins_behind_all_but_the_last() -> None:
    """It waits for the launch in front alone, a small one, and reads before that what a long launch
    in front of both has written."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 8192, device="cuda"), torch.randn(4096, 8192, device="cuda")
    small, want = torch.randn(1, 64, device="cuda"), None
    for _ in range(20):
        early = projection_step(x, w)
        late = rms_norm(small)
        out = torch.empty_like(early)
        grid = (-(-early.numel() // 1024),)
        user_kernel[grid](early, late, out, early.numel(), BLOCK=1024, launch_pdl=True)
        want = early + late[0, 0] if want is None else want
        assert torch.equal(out, want)
        early.zero_()
