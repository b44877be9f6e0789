"""mixer_step on a GPU: every kind against the formula, shared windows, and graphs."""

from dataclasses import replace

import pytest
import torch

from slipstream.ops import mixer_step
from tests.support.mixer_steps import (
    INDICES,
    KINDS,
    POOLS,
    Sizes,
    check,
    check_drafts_leave_no_trace,
    expected,
    make,
)
from tests.support.operators import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
SIZES = (Sizes(), Sizes(K=128, V=128, H=2, HV=4), Sizes(T=5, K=64, V=64, pending=2))
# exp and log of a GPU are approximations
LIMIT = 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=["odd", "128", "drafts"])
def test_step_matches_the_formula(kind: str, size: Sizes) -> None:
    with torch.device("cuda"), torch.no_grad():
        check(kind, "triton", size, limit=LIMIT)
        check(kind, "triton", size, v_first=True, limit=LIMIT)


@pytest.mark.parametrize("kind", ["gated_deltanet", "delta_net", "retention"])
@pytest.mark.parametrize(
    ("K", "V", "T", "pending", "v_first"),
    [(128, 128, 8, 4, False), (128, 128, 8, 4, True), (64, 64, 9, 8, True), (64, 128, 5, 1, False)],
)
def test_drafts_in_16_bits(kind: str, K: int, V: int, T: int, pending: int, v_first: bool) -> None:
    """y to its rounding, and states to float32 in three products of bfloat16."""
    dtype, pool_dtype = torch.bfloat16, torch.float32
    if K < V:
        dtype, pool_dtype = torch.float16, torch.bfloat16
    n = Sizes(HV=4, K=K, V=V, T=T, pending=pending, short=K == 64, dtype=dtype)
    n = replace(n, pool_dtype=pool_dtype)
    pool_limit = 1e-4 if pool_dtype == torch.float32 else 4e-3
    with torch.device("cuda"), torch.no_grad():
        for strength in (0.0, 1.0, 1e3):
            check(kind, "triton", n, v_first, limit=4e-3, strength=strength, pool_limit=pool_limit)


def test_drafts_of_nan_leave_no_trace() -> None:
    with torch.device("cuda"), torch.no_grad():
        n = Sizes(H=2, HV=4, K=128, V=128, T=8, pending=4, dtype=torch.bfloat16)
        check_drafts_leave_no_trace("triton", n)


@pytest.mark.parametrize("kind", ["gated_deltanet", "mamba2"])
def test_programs_share_windows_and_norms(kind: str) -> None:
    """Many sequences and steps: windows are the last inputs, and two runs have the same bits."""
    n, steps = 96, 40
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        with torch.device("cuda"), torch.no_grad():
            args, options = make(KINDS[kind], Sizes(H=2, HV=8, K=64, V=64))
            args = {m: x.repeat(n // 3, 1, 1, 1) if m in "qkvz" else x for m, x in args.items()}
            for name in ("g", "beta"):
                if name in args:
                    args[name] = args[name].repeat(n // 3, 1, 1)
            for name in POOLS:
                args[name] = args[name][:1].repeat(n, *[1] * (args[name].dim() - 1))
            at = torch.randperm(n)
            tokens = torch.randn(steps, *args["q"].shape)
            ys = [
                mixer_step(**{**args, "q": q}, **options, state_indices=at, impl="triton")
                for q in tokens
            ]
        runs.append((torch.stack(ys), args["state"], args["conv_state"]))
    assert all(map(torch.equal, *runs))
    window = args["conv_state"][at]
    keys = args["q"][0].numel()
    window = window[:, -keys:] if kind == "mamba2" else window[:, :keys]
    assert torch.equal(window, tokens[-4:, :, 0].flatten(2).permute(1, 2, 0))


def test_captured_step_takes_other_slots() -> None:
    with torch.device("cuda"), torch.no_grad():
        args, options = make(KINDS["gated_deltanet"], Sizes(K=64, V=64))
        at = torch.tensor(INDICES)
        other = torch.tensor((5, 6, -1))
        want = expected(args, options, other)
        before = {name: args[name].clone() for name in POOLS}
        options |= {"state_indices": at, "impl": "triton"}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            mixer_step(**args, **options)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = mixer_step(**args, **options)
        for name in POOLS:
            args[name].copy_(before[name])
        at.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
    assert relative_error(y, want["out"]) <= LIMIT
    for name in POOLS:
        assert relative_error(args[name], want[name]) <= LIMIT
