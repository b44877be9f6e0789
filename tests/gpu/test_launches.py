"""Launches on a GPU: one after another, played again, and of other sizes."""

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from slipstream import ops
from slipstream.ops import mixer_step, projection_step, rms_norm
from slipstream.runtime import call_replay
from slipstream.runtime.launch_cache import CachedKernel, FusedKernel
from slipstream.tools.catalog import SAMPLES, Sample, Shape
from tests.gpu.waiting import graph_of

# ---- Launches that begin before the one in front has ended give the bits of launches one by one.


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


# ---- A cached launch gives the same bits as Triton's own, whatever came before.


def results_of_launches(T: int, dtype: torch.dtype, shift: int) -> list[torch.Tensor]:
    torch.manual_seed(T)

    def some(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, device="cuda", dtype=dtype)
        room = x.new_empty(x.numel() + shift)[shift:].view(shape)  # may begin anywhere
        return room.copy_(x / 8).requires_grad_()

    q, k, v = (some(1, T, 2, 64) for _ in range(3))
    g, beta = -torch.rand(1, T, 2, device="cuda"), torch.rand(1, T, 2, device="cuda")
    x, weight = some(T, 96), some(96)
    pool = torch.zeros(T, 2, 64, 64, device="cuda")
    with torch.no_grad():
        step: Any = [t.detach().transpose(0, 1) for t in (q, k, v, g, beta)]
        stepped = ops.recurrent_step(*step[:3], state=pool, g=step[3], beta=step[4])
    outs = [
        ops.chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0],
        ops.chunk_gla(q, k, v, g[..., None].expand(q.shape).contiguous())[0],
        ops.chunk_retention(q, k, v)[0],
        ops.attention(q, k, v),
        ops.short_convolution(x[None], some(96, 4), activation="silu")[0],
        ops.swiglu(x, x),
        ops.rms_norm(x, weight),
    ]
    wanted = (q, k, v, x, weight)
    loss = torch.stack([o.float().square().sum() for o in outs]).sum()
    grads = torch.autograd.grad(loss, wanted)
    return [stepped, pool, *outs, *grads]


def test_kept_launches_are_tritons() -> None:
    for T, dtype in (
        (1, torch.bfloat16),
        (16, torch.float16),
        (100, torch.bfloat16),
        (128, torch.bfloat16),
    ):
        for shift in (0, 8, 1, 0):
            got = results_of_launches(T, dtype, shift)
            with (
                mock.patch.object(call_replay, "ENABLED", False),
                mock.patch.object(
                    CachedKernel, "__getitem__", lambda kept, grid: FusedKernel(kept.kernel)[grid]
                ),
            ):
                want = results_of_launches(T, dtype, shift)
            torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---- A call that is played from its record gives the same bits as one that is worked out.


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
    floating, fixed = (torch.bfloat16, torch.float32), sample.fixed.split()
    leaves = [
        x.requires_grad_() for n, x in given.items() if x.dtype in floating and n not in fixed
    ]
    outs = sample.call({**args, **given})
    wanted = [x for x in outs if x.requires_grad]
    if not wanted:
        return outs
    loss = torch.stack([x.float().square().sum() for x in wanted]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outs, *(x for x in grads if x is not None)]


def played(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Its result, and the records that it played."""
    with mock.patch.object(
        call_replay.RecordedCall, "play", autospec=True, side_effect=_PLAY
    ) as play:
        return call(), [x.args[0] for x in play.call_args_list]


def expect_as_called(call: Callable[[], list[Tensor]], what: Any = None) -> int:
    """The same bits by records and as it is worked out; how many records were played."""
    got, records = played(call)
    with mock.patch.object(call_replay, "ENABLED", False):
        want = call()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x.nan_to_num(3.0), y.nan_to_num(3.0)), what
    return len(records)


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
        plays = expect_as_called(lambda args=args: results(sample, args))
    assert plays >= 2, "forward and backward are not played"


@pytest.mark.parametrize("op", ["chunk_gsa", "chunk_gated_delta_product"])
def test_inference_is_one_record_of_launches(op: str) -> None:
    sample = next(x for x in SAMPLES if x.op == op)
    args = sample.inputs(SHAPES["whole"], torch.device("cuda"))
    with torch.no_grad():
        sample.call(args)
        sample.call(args)
        _, (record,) = played(lambda: sample.call(args))
    assert record.operations == 0


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


@pytest.mark.parametrize("D", [64, 128, 256, 80, 512])
@pytest.mark.parametrize("name", ATTENTION)
def test_replayed_attention_is_the_call(name: str, D: int) -> None:
    options = dict(ATTENTION[name])
    B, T, H = 1 if "cu_seqlens" in options else 2, 300, 4
    for n in ("cu_seqlens", "key_lengths"):
        if n in options:
            options[n] = torch.tensor(options[n], device="cuda", dtype=torch.int32)
    plays = 0
    for turn in range(5):
        torch.manual_seed(turn)
        make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        leaves = [torch.randn(B, T, h, D, **make).requires_grad_() for h in (H, 2, 2)]
        if "sinks" in options:
            options["sinks"] = torch.randn(H, device="cuda").requires_grad_()
        if "g" in options:
            options["g"] = (-torch.rand(B, T, H, device="cuda")).requires_grad_()
        leaves += [options[n] for n in ("sinks", "g") if n in options]
        plays += expect_as_called(lambda leaves=leaves: with_gradients(options, leaves))
    assert plays >= 3, "forward, or backward, is not played"


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
    graph, (got, _) = graph_of(lambda: ops.chunk_simple_gla(q, k, v, g))
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

        def call(x: Tensor = x, h: Tensor = h) -> list[Tensor]:
            y, stream = ops.rms_norm(x, weight, residual=h, prenorm=True)
            return [y, stream, *torch.autograd.grad((y * stream).sum(), (x, h, weight))]

        assert expect_as_called(call) == 2 or turn < 2


# ---- Calls of sizes not seen before are played from records, with the bits of the call as it is.


# Of a row's calls: after the first ones most are of sizes that a record holds for.
TURNS, WARM = 9, 5
CASES = [
    (sample, packed)
    for sample in SAMPLES
    if not sample.random
    for packed in ((False, True) if "cu_seqlens" in sample.takes else (False,))
]


def shape_of(random: Random, packed: bool, turn: int) -> Shape:
    most = 2500 if turn % 3 == 2 else 400
    lengths = tuple(random.randint(1, most // 5) for _ in range(random.randint(2, 20)))
    return Shape(
        B=random.randint(1, 4), T=random.randint(20, most), H=4, K=64, V=64, D=256, Z=501,
        state=True, lengths=lengths if packed else None,
    )  # fmt: skip


@pytest.mark.parametrize(("sample", "packed"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_other_sizes_are_the_call(sample: Sample, packed: bool) -> None:
    random, plays = Random(0), 0
    for turn in range(TURNS):
        torch.manual_seed(turn)
        shape = shape_of(random, packed or sample.packed, turn)
        args = sample.inputs(shape, torch.device("cuda"))
        count = expect_as_called(lambda args=args: results(sample, args), shape)
        plays += count if turn >= WARM else 0
    assert plays or not sample.op.startswith(("chunk_", "attention", "rms_norm"))
