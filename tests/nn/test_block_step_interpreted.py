"""Steps of one token in blocks by impl="triton", interpreted: the bits of the block."""

import re
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.kernels.mixer_step.block_inputs import Blocks, block_inputs
from slipstream.nn.conv import ShortConvolution
from slipstream.ops import chunk_gated_delta_rule, l2_norm
from slipstream.ops.conv import _convolve
from slipstream.runtime.consistent import BlockStep, consistent
from tests.support.block_inputs import LAYERS, check_inputs, inputs
from tests.support.interpreted import interpreted

H, K = 2, 64


def check_formula(bound: float | None, channels: tuple[int, ...], impl: str) -> None:
    tokens, blocks = inputs(3, H, K, channels, bound)
    before = Blocks._make(x.clone() for x in blocks)
    block_inputs(tokens, blocks, impl)
    x, weight, _, g, A_log, dt_bias, beta, counts, *_ = tokens
    window = torch.cat([before.window[:, 1:], x[:, None]], 1)
    q, k, v = F.silu((window * weight.t()).sum(1)).view(len(x), 3, H, K).unbind(1)
    q, k = (F.normalize(y, dim=-1) for y in (q, k))
    raw = g + dt_bias.view(g.shape[1:])
    rate = A_log.exp().view(-1, *[1] * len(channels))
    decay = -rate * F.softplus(raw) if bound is None else bound * (rate * raw).sigmoid()
    want = q, k, v, decay, 2 * beta.sigmoid()
    for got, old, token in zip(blocks[1:], before[1:], want, strict=True):
        old[torch.arange(len(x)), counts] = token
        torch.testing.assert_close(got, old, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(blocks.window, window)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("channels", [(), (K,)], ids=["heads", "channels"])
def test_plain_step_matches_formula(bound: float | None, channels: tuple[int, ...]) -> None:
    check_formula(bound, channels, "eager")


@interpreted
def test_window_moves_once_all_threads_have_read_it() -> None:
    """Several threads load a number of a block that has fewer than there are threads."""
    from triton.runtime.interpreter import InterpreterBuilder

    marks = {"set_grid_idx": "\n", "create_barrier": "b"}
    marks |= {"create_masked_load": "l", "create_masked_store": "s"}
    events: list[str] = []
    with ExitStack() as stack:
        for name, mark in marks.items():
            original = getattr(InterpreterBuilder, name)

            def call(self: Any, *args: Any, of: Any = (original, mark), **named: Any) -> Any:
                events.append(of[1])
                return of[0](self, *args, **named)

            stack.enter_context(mock.patch.object(InterpreterBuilder, name, call))
        block_inputs(*inputs(3, H, K), "triton")
    programs = "".join(events).split()
    assert len(programs) == 3 * 2 * H
    assert all(re.match("l{5}bs{4}", x) for x in programs), programs


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


@interpreted
@torch.no_grad()
def test_consistent_prompts_round_before_norms_as_steps_do() -> None:
    torch.manual_seed(0)
    width = 64
    x, past = torch.randn(2, 9, 6 * width).half(), torch.randn(2, 6 * width, 4).half()
    weight = torch.randn(6 * width, 4).half()
    for state in (None, past):
        given = x, weight, None, "silu", None, state, False, None, None, "triton"
        with consistent():
            found, _ = _convolve(*given, (2 * width,) * 3, width)
        (y,), _ = _convolve(*given, None)
        want = l2_norm(y[..., : 4 * width].unflatten(-1, (-1, width)), impl="triton").flatten(-2)
        assert torch.equal(torch.cat(found[:2], -1), want)
        within, _ = _convolve(*given, (2 * width,) * 3, width)
        assert not torch.equal(torch.cat(within[:2], -1), want)  # rounds once


@interpreted
def test_steps_have_the_bits_of_blocks() -> None:
    check(1)
    check(2)
    for bound in (None, -5.0):
        for channels in ((), (K,)):
            check_formula(bound, channels, "triton")
    for make, bound in LAYERS:
        check_inputs(make(), bound, torch.float16)
