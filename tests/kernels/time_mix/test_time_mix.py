"""The mix of tokens and RWKV-7's step: in plain torch, by Triton's interpreter, and compiled for
GPUs that need not be there: spills, wide loads, barriers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.compiler.aot import compile_kernel
from slipstream.compiler.trace import trace
from slipstream.kernels.time_mix import rwkv7_step as low_rank
from slipstream.kernels.time_mix import token_mix
from slipstream.layers.rwkv7 import RWKV7ChannelMix
from slipstream.nn.decoding import sequence_starts
from slipstream.ops import rwkv7_step, token_mix_step
from tests.support import rwkv7_steps as steps
from tests.support import wants
from tests.support.interpreted import error, interpreted
from tests.support.rwkv7_steps import Sizes, make


def one_by_one(
    x: Tensor,
    before: Tensor | None,
    mu: Tensor,
    weights: token_mix.Weights,
    starts: Tensor | None = None,
) -> list[Tensor]:
    mixes = token_mix.plain(x, before, starts, mu)
    return [F.linear(mix, w) for mix, row in zip(mixes, weights) for w in row]


def by_kernels(*args: Any, starts: Tensor | None = None) -> list[Tensor] | None:
    return token_mix.mixed_projections(*args, impl="triton", starts=starts)


def check(
    B: int,
    T: int,
    D: int,
    outputs: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    shifted: bool = False,
    offsets: Sequence[int] = (),
) -> None:
    """outputs: of each mix the rows of its weights. shifted: x itself is what came before, of
    packed sequences with these offsets if there are any."""
    given = [torch.randn(B, T, D), torch.randn(B, T, D), torch.rand(len(outputs), D)]
    given += [torch.randn(n, D) / D**0.5 for row in outputs for n in row]
    dys = [torch.randn(B, T, n) for row in outputs for n in row]
    starts = sequence_starts(torch.tensor(offsets), T) if offsets else None
    found = []
    for call, as_dtype in ((by_kernels, dtype), (one_by_one, torch.float64)):
        x, before, mu, *matrices = (t.to(dtype).to(as_dtype).requires_grad_() for t in given)
        left = iter(matrices)
        weights = [[next(left) for _ in row] for row in outputs]
        leaves = [x, *([] if shifted else [before]), mu, *matrices]
        before = None if shifted else before
        ys = call(x, before, mu, weights, starts=starts)
        assert ys is not None
        grads = torch.autograd.grad(ys, leaves, [t.to(as_dtype) for t in dys])
        with torch.no_grad():
            again = call(x, before, mu, weights, starts=starts)
        assert again is not None
        found.append([*ys, *again, *grads])
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert error(got, want) < limit, (B, T, D, outputs, dtype, i)


def check_one_of_two() -> None:
    """Where nothing comes of the other projection."""
    given = [torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.rand(2, 8)]
    given += [torch.randn(4, 8), torch.randn(3, 8)]
    found = []
    for call in (by_kernels, one_by_one):
        x, before, mu, first, second = leaves = [t.clone().requires_grad_() for t in given]
        ys = call(x, before, mu, [[first], [second]])
        assert ys is not None
        grads = torch.autograd.grad(ys[0].square().sum(), leaves, allow_unused=True)
        found.append([torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves)])
    torch.testing.assert_close(*found)


def check_packed_layer() -> None:
    """Of packed sequences in a layer, each is as alone."""
    offsets = 0, 1, 6, 6, 11
    layer = RWKV7ChannelMix(8, 16)
    torch.nn.init.uniform_(layer.mix)
    given = torch.randn(1, 11, 8)
    whole, apart = given.clone().requires_grad_(), given.clone().requires_grad_()
    y, _ = layer(whole, cu_seqlens=torch.tensor(offsets))
    alone = torch.cat([layer(apart[:, i:j])[0] for i, j in pairwise(offsets) if j > i], 1)
    torch.testing.assert_close(y, alone)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, [whole, *layer.parameters()], dy),
        torch.autograd.grad(alone, [apart, *layer.parameters()], dy),
    )


@interpreted
def test_triton_token_mix_matches_operations() -> None:
    check_packed_layer()
    check_one_of_two()
    check(2, 7, 20, ((12,), (3,), (12,), (12, 5), (3,), (4,)), torch.float32)
    check(1, 300, 6, ((4,),), torch.float32)
    check(1, 3, 1030, ((4,), (2, 3)), torch.float32)
    check(2, 5, 8, ((), (4,)), torch.float32)
    check(2, 9, 33, ((4,), (2, 3)), torch.float16)
    check(3, 7, 20, ((12,), (3, 2)), torch.float32, shifted=True)
    check(1, 300, 6, ((4,),), torch.float32, shifted=True)
    check(5, 1, 1030, ((4,), (2,)), torch.float32, shifted=True)
    check(2, 9, 33, ((4,), (2, 3)), torch.float16, shifted=True)
    # sequences of one token, of none, and longer than a program's rows
    check(1, 300, 6, ((4,),), torch.float32, shifted=True, offsets=(0, 1, 2, 2, 90, 91, 300))
    check(1, 9, 1030, ((4,), (2, 3)), torch.float32, shifted=True, offsets=(0, 0, 4, 8, 9, 9))
    check(1, 33, 20, ((12,), (3, 2)), torch.float16, shifted=True, offsets=(0, 7, 16, 33))
    x, mu = torch.randn(2, 3, 8), torch.rand(3, 8)
    starts = torch.tensor([1, 0, 1], dtype=torch.uint8)
    mixes = torch.randn(3, 2, 3, 8)
    torch.library.opcheck(token_mix._forward.overload, (x, x.clone(), None, mu, "triton"))
    torch.library.opcheck(
        token_mix._forward.backward.overload, (mixes, x, x.clone(), None, mu, "triton")
    )
    for given in ((None, None), (None, starts)):
        torch.library.opcheck(token_mix._forward.overload, (x, *given, mu, "triton"))
        torch.library.opcheck(
            token_mix._forward.backward.overload, (mixes, x, *given, mu, "triton")
        )


MODULE = "slipstream.kernels.time_mix.triton.token_mix"


@wants.triton
@pytest.mark.parametrize(("x", "state"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_step_has_read_a_wide_pool_when_it_writes(x: str, state: str) -> None:
    """A thread may write what another reads, and waits for it by no other conversion's barrier."""
    tensors = dict.fromkeys(("x_ptr", "mu_ptr", "y_ptr"), f"*{x}") | {"state_ptr": f"*{state}"}
    scalars = dict.fromkeys(("N", "slots"), "i32") | dict.fromkeys(("row_x", "row_state"), "i32:16")
    flags = {"D": 2048, "M": 6, "BD": 512}
    name = f"{MODULE}:token_mix_step_kernel"
    ir = compile_kernel(name, tensors, flags, scalars, warps=2).asm["ttir"]
    assert ("barrier" in ir) == (x != state)


@interpreted
def test_triton_rwkv7_step_matches_formula() -> None:
    steps.check_all("triton")
    steps.check_tiles_of_columns("triton")
    steps.check_probe()
    assert steps.check_layer("triton") == ["token_mix_step", "low_rank", "rwkv7_step"] * 4


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_plain_rwkv7_step_matches_formula(impl: str) -> None:
    steps.check_all(impl)


def test_layer_by_it_and_by_its_parts() -> None:
    assert steps.check_layer(None) == ["token_mix_step", "low_rank", "rwkv7_step"] * 4


REFUSALS: dict[str, dict[str, Any]] = {
    r"v_gate: wants first_value": {"first_value": None},
    r"v_bias: wants v_gate": {"first_value": None, "v_gate": None},
    r"norm_eps: want 0 or more": {"norm_eps": -1.0},
    r"state_indices: want each slot at most once": {"state_indices": torch.tensor([1, 1, -1])},
    r"state_indices: want less than the 5 slots": {"state_indices": torch.tensor([1, 5, -1])},
    r"state: want shape \(3, ": {"state_indices": None},
}


@pytest.mark.parametrize("words", REFUSALS)
def test_rwkv7_step_refuses(words: str) -> None:
    args = steps.make(steps.Sizes()) | {"state_indices": torch.tensor(steps.INDICES)}
    with pytest.raises(ValueError, match=words):
        rwkv7_step(**{**args, **REFUSALS[words]})


def test_steps_refuse_gradients() -> None:
    args = steps.make(steps.Sizes())
    args["state"] = args["state"][:3].clone()
    args["k"].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad"):
        rwkv7_step(**args)
    mu = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad"):
        token_mix_step(torch.randn(3, 8), mu, state=torch.randn(3, 8))


def test_low_rank_products_of_no_tokens() -> None:
    t = steps.low_rank_inputs(0, 8, (5, 3, 4), torch.float32)
    assert low_rank.low_rank(t).shape == (3, 0, 8)


@wants.triton
@pytest.mark.parametrize(
    ("K", "v_first", "stack"), [(64, False, 0), (64, True, 0), (128, False, 0), (256, False, 300)]
)
def test_rwkv7_step_compiles(K: int, v_first: bool, stack: int) -> None:
    n = Sizes(K=K, dtype=torch.bfloat16)
    args: Any = make(n)

    def call(device: torch.device) -> None:
        given: Any = {
            m: torch.empty(x.shape, dtype=x.dtype, device=device) for m, x in args.items()
        }
        at = torch.empty(n.N, dtype=torch.int32, device=device)
        rwkv7_step(**given, state_indices=at, state_v_first=v_first, impl="triton")

    (job,) = (x for x in trace(call, "sm_90", backward=False) if "rwkv7_step" in x.kernel)
    made = job.compile()
    assert made.stack <= stack
    # a tile of the state is read by loads of 16 bytes, all of them before anything is stored
    loads = made.ptx[: made.ptx.index("st.global.v4")].count("v4.b32 {")
    assert loads >= min(K * K, 16384) // (4 * 32 * job.warps)
