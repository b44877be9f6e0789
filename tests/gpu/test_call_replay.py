"""A call that is played from its record gives the same bits as one that is worked out."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.runtime import call_replay
from slipstream.tools.catalog import SAMPLES, Sample, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
SHAPES = {
    "whole": Shape(B=1, T=130, H=2, K=64, V=64, state=True),
    "packed": Shape(B=2, T=70, H=2, K=64, V=64, packed=True, grouped=True),
    "split": Shape(B=1, T=8192, H=1, K=64, V=64),
}
_PLAY = call_replay.RecordedCall.play
LINEAR = [x for x in SAMPLES if x.op.startswith(("chunk_", "fused_recurrent_"))]


def results(sample: Sample, args: dict[str, Any]) -> list[Tensor]:
    """Outputs, then gradients."""
    given = {n: x.detach().clone() for n, x in args.items() if isinstance(x, Tensor)}
    leaves = [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    outs = [x for x in sample.call({**args, **given}) if x.requires_grad]
    loss = torch.stack([x.float().square().sum() for x in outs]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outs, *(x for x in grads if x is not None)]


@pytest.mark.parametrize("sample", LINEAR, ids=lambda x: x.op)
@pytest.mark.parametrize("shape", SHAPES)
def test_replay_is_the_call(sample: Sample, shape: str) -> None:
    check(sample, SHAPES[shape])


def test_long_steps_are_played() -> None:
    sample = next(x for x in SAMPLES if x.op == "chunk_gated_delta_product")
    check(sample, Shape(B=1, T=4096, H=64, K=128, V=128))


def check(sample: Sample, shape: Shape) -> None:
    for turn in range(4):
        torch.manual_seed(turn)
        args = sample.inputs(shape, torch.device("cuda"))
        with mock.patch.object(
            call_replay.RecordedCall, "play", autospec=True, side_effect=_PLAY
        ) as play:
            got = results(sample, args)
        with mock.patch.object(call_replay, "ENABLED", False):
            want = results(sample, args)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
    assert play.call_count >= 2, "forward and backward are not played"


@pytest.mark.parametrize("op", ["chunk_gsa", "chunk_gated_delta_product"])
def test_inference_is_one_record_of_launches(op: str) -> None:
    sample = next(x for x in SAMPLES if x.op == op)
    args = sample.inputs(SHAPES["whole"], torch.device("cuda"))
    with torch.no_grad():
        sample.call(args)
        sample.call(args)
        with mock.patch.object(
            call_replay.RecordedCall, "play", autospec=True, side_effect=_PLAY
        ) as play:
            sample.call(args)
    record = play.call_args.args[0]
    assert play.call_count == 1 and record.operations == 0


ATTENTION: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": 50},
    "window, softcap": {"causal": False, "window_size": (40, 20), "softcap": 5.0},
    "packed": {"causal": True, "cu_seqlens": (0, 5, 5, 180, 300)},
    "used": {"causal": True, "key_lengths": (300, 7)},
    "sinks": {"causal": True, "sinks": True},
    "gate": {"causal": True, "g": True},
}


def with_gradients(options: dict[str, Any], leaves: list[Tensor]) -> list[Tensor]:
    """o, lse and the gradients; leaves: q, k, v, and those of the options that have one."""
    o, lse = ops.attention(*leaves[:3], **options, return_lse=True)
    seen = torch.where(lse.isfinite(), lse, 0.0)
    grads = torch.autograd.grad([o, seen], leaves, [torch.ones_like(o), torch.ones_like(lse)])
    return [o, lse, *grads]


@pytest.mark.parametrize("D", [64, 128, 256, 80])
@pytest.mark.parametrize("name", ATTENTION)
def test_replayed_attention_is_the_call(name: str, D: int) -> None:
    options = dict(ATTENTION[name])
    B, T, H = 1 if "cu_seqlens" in options else 2, 300, 4
    for n in ("cu_seqlens", "key_lengths"):
        if n in options:
            options[n] = torch.tensor(options[n], device="cuda", dtype=torch.int32)
    played = 0
    for turn in range(5):
        torch.manual_seed(turn)
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        leaves = [torch.randn(B, T, h, D, **make).requires_grad_() for h in (H, 2, 2)]
        if "sinks" in options:
            options["sinks"] = torch.randn(H, device="cuda").requires_grad_()
        if "g" in options:
            options["g"] = (-torch.rand(B, T, H, device="cuda")).requires_grad_()
        leaves += [options[n] for n in ("sinks", "g") if n in options]
        with mock.patch.object(
            call_replay.RecordedCall, "play", autospec=True, side_effect=_PLAY
        ) as play:
            got = with_gradients(options, leaves)
        played += play.call_count
        with mock.patch.object(call_replay, "ENABLED", False):
            want = with_gradients(options, leaves)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)
    assert played >= 3, "forward, or backward, is not played"


def test_replayed_steps_are_the_calls() -> None:
    pools = [torch.zeros(9, 4, 64, 64, device="cuda") for _ in range(2)]
    for turn in range(6):
        torch.manual_seed(turn)
        q, k, v = (torch.randn(8, 1, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        beta, slots = torch.rand(8, 1, 4, device="cuda"), torch.randperm(9, device="cuda")[:8]
        k = q if turn == 2 else k  # the same tensor, in the call that is recorded or played

        given: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": beta, "state_indices": slots}
        got = ops.recurrent_step(**given, state=pools[0])
        with mock.patch.object(call_replay, "ENABLED", False):
            want = ops.recurrent_step(**given, state=pools[1])
        assert torch.equal(got, want) and torch.equal(*pools)


def test_replay_in_a_graph() -> None:
    q, k, v = (torch.randn(1, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g = -torch.rand(1, 200, 2, device="cuda")
    for _ in range(3):
        ops.chunk_simple_gla(q, k, v, g)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.chunk_simple_gla(q, k, v, g)[0]
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    with mock.patch.object(call_replay, "ENABLED", False):
        assert torch.equal(got, ops.chunk_simple_gla(q, k, v, g)[0])


def test_norms_of_a_model_are_played() -> None:
    """Whose weight is a parameter, and which add up a residual."""
    weight = torch.nn.Parameter(torch.rand(256, device="cuda"))
    for turn in range(4):
        x, h = (torch.randn(64, 256, device="cuda", requires_grad=True) for _ in range(2))
        found: list[list[Tensor]] = []
        played = 0
        for enabled in (True, False):
            with (
                mock.patch.object(call_replay, "ENABLED", enabled),
                mock.patch.object(
                    call_replay.RecordedCall, "play", autospec=True, side_effect=_PLAY
                ) as play,
            ):
                y, stream = ops.rms_norm(x, weight, residual=h, prenorm=True)
                grads = torch.autograd.grad((y * stream).sum(), (x, h, weight))
            found.append([y, stream, *grads])
            played += play.call_count
        assert all(map(torch.equal, *found))
        assert turn < 2 or played == 2
