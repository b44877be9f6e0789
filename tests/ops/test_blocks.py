"""Building blocks around attention: properties of each, beside torch's own, what they refuse."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from slipstream.kernels.conv import eager
from slipstream.nn import decoding
from slipstream.ops.activation import glu_linear, swiglu
from slipstream.ops.conv import short_convolution, short_convolution_update
from slipstream.ops.embedding import embedding
from slipstream.ops.norm import l2_norm, rms_norm
from slipstream.ops.rotary import packed_positions, rotary_embedding, rotary_tables
from slipstream.tools.catalog import Sample
from tests.support import wants
from tests.support.formulas import wanted
from tests.support.operators import BLOCKS, EPS, block_size, cast, with_grads

every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Relative to the largest value, at least one."""
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        size = float(y.abs().max()) if y.numel() else 0.0
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=tolerance * max(size, 1.0))


@every_block
@pytest.mark.parametrize(("T", "D"), [(1, 6), (7, 12), (100, 30)])
def test_block_matches_reference(block: Sample, T: int, D: int) -> None:
    args = block.inputs(block_size(T, D))
    got, grads = with_grads(block.call, args)
    want, want_grads = with_grads(partial(wanted, block), cast(args, torch.float64))
    assert_near(got, want, 64 * EPS[torch.float32])
    # a parameter's gradient sums over T rows
    assert_near(grads, want_grads, 64 * EPS[torch.float32] * T**0.5)


@every_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_block_in_16_bit_rounds_about_once(block: Sample, dtype: torch.dtype) -> None:
    args = cast(block.inputs(block_size(20, 12)), dtype)
    got, grads = with_grads(block.call, args)
    want, want_grads = with_grads(partial(wanted, block), cast(args, torch.float64))
    assert_near(got, want, 4 * EPS[dtype])
    assert_near(grads, want_grads, 8 * EPS[dtype])


# seconds a block: in the default run one of each Function is traced; tests/ops/test_compile.py
# takes operators through Inductor
TRACED = {"rms_norm", "rms_norm_gated-mamba2", "group_norm", "short_convolution", "swiglu"}
TRACED |= {"rotary_embedding-positions", "token_shift-packed", "glu_linear", "embedding"}
TRACED |= {"short_convolution_update-bias", "cross_entropy-mean", "linear_cross_entropy-none"}
TRACED |= {"attention", "attention-packed-cache", "selective_scan-gated", "selective_scan-groups"}
COMPILED = {"aot_eager": TRACED, "inductor": set[str]()}


# torch's own: of importing Inductor, and of Dynamo making an autograd.Function's ctx
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every_block
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.sample(which=lambda block, backend: block.name in COMPILED[backend])
def test_block_compiles_fullgraph_without_recompiling(block: Sample, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block.call, fullgraph=True, dynamic=True, backend=backend)
    for n, T in enumerate((15, 31, 14)):
        args = block.inputs(block_size(T, 6))
        want, want_grads = with_grads(block.call, args)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got, grads = with_grads(compiled, args)
        assert_near(got, want, 256 * EPS[torch.float32])
        assert_near(grads, want_grads, 256 * EPS[torch.float32])


@every_block
@pytest.mark.sample(which=lambda block: block.name in TRACED)
def test_block_exports(block: Sample) -> None:
    args = block.inputs(block_size(9, 6))

    class Module(torch.nn.Module):
        def forward(self, args):
            return block.call(args)

    program = torch.export.export(Module(), (args,))
    torch.testing.assert_close(program.module()(args), block.call(args))


def test_glu_linear_keeps_no_product_for_the_backward() -> None:
    gate, up, weight = (torch.randn(*s, requires_grad=True) for s in ((9, 6), (9, 6), (4, 6)))
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        glu_linear(gate, up, weight)
    assert {id(x) for x in kept} == {id(x) for x in (gate, up, weight)}


def test_glu_linear_under_autocast_is_its_parts() -> None:
    gate, up, weight = torch.randn(9, 6), torch.randn(9, 6), torch.randn(4, 6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = glu_linear(gate, up, weight)
        want = torch.nn.functional.linear(swiglu(gate.bfloat16(), up.bfloat16()), weight)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want)
    (grad,) = torch.autograd.grad(y.float().sum(), weight)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("bad", [-1, 32000, 50300])
def test_embedding_rejects_an_id_outside_the_vocabulary(bad: int) -> None:
    ids = torch.zeros(2, 20, dtype=torch.int64)
    ids[0, 17] = bad
    word = rf"input_ids: id {bad} at position \(0, 17\) is outside the vocabulary of 32000"
    with pytest.raises(ValueError, match=word):
        embedding(ids, torch.zeros(32000, 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_embedding_rejects_wrong_ids() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(embedding, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(5, 3)
    assert torch.equal(compiled(torch.tensor([4]), weight), weight[4:])
    with pytest.raises(ValueError, match="id 5 at position"):
        compiled(torch.tensor([5]), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embedding_gradient_adds_in_float32(dtype: torch.dtype) -> None:
    """A token that a batch has many times: 16 bits hold no running sum of that many ones."""
    weight = torch.zeros(4, 3, dtype=dtype, requires_grad=True)
    embedding(torch.tensor([2] * 5000 + [1]), weight).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == dtype
    assert torch.equal(weight.grad[:, 0], torch.tensor([0, 1, 5000, 0]).to(dtype))


def test_l2_norm_of_zero() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    y = l2_norm(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("way", ["grad of vmap", "make_fx", "jit.trace"])
def test_l2_norm_recorded_without_gradients_has_them(way: str) -> None:
    x, given = torch.randn(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.float64)
    want = torch.func.grad(lambda x: (l2_norm(x) ** 3).sum())(x)
    if way == "grad of vmap":
        got = torch.func.grad(lambda x: (torch.func.vmap(l2_norm)(x) ** 3).sum())(x)
    else:
        trace = torch.jit.trace if way == "jit.trace" else lambda fn, x: make_fx(fn)(x)
        graph: Any = trace(lambda x: l2_norm(x), given)
        x.requires_grad_()
        (got,) = torch.autograd.grad((graph(x) ** 3).sum(), x)
    torch.testing.assert_close(got, want)


def test_rms_norm_residual_in_fp32() -> None:
    x = torch.full((1, 8), 2.0**-9, dtype=torch.bfloat16)
    residual = torch.ones(1, 8, dtype=torch.bfloat16)
    y, h = rms_norm(x, residual=residual, prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(h, torch.full((1, 8), 1 + 2.0**-9))


def test_rms_norm_takes_weights_of_another_dtype() -> None:
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.rand(8)
    y = rms_norm(x, weight)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, rms_norm(x.float(), weight).bfloat16())


def test_xpos_has_gradients() -> None:
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(torch.arange(5), 4, xpos=-3.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotary_embedding(x, *tables), x)


def test_rotary_tables_by_position_or_token() -> None:
    x, at = torch.randn(2, 5, 3, 8), torch.randint(0, 20, (2, 5))
    by_position = rotary_embedding(x, *rotary_tables(torch.arange(20), 8), positions=at)
    assert torch.equal(by_position, rotary_embedding(x, *rotary_tables(at, 8)))
    tables = rotary_tables(torch.arange(20), 8)
    one_row, row = (rotary_embedding(x, *tables, positions=p) for p in (at[:1], at[0]))
    assert torch.equal(one_row, row)


def test_packed_positions_begin_anew_in_each_sequence() -> None:
    offsets = torch.tensor([0, 3, 3, 5])
    assert packed_positions(offsets, 5).tolist() == [[0, 1, 2, 0, 1]]
    started = packed_positions(offsets, 5, offsets=torch.tensor([10, 20, 30]))
    assert started.tolist() == [[10, 11, 12, 30, 31]]


def test_rotary_rejects_faults_by_name() -> None:
    x = torch.randn(2, 5, 3, 8)
    cos, sin = rotary_tables(torch.arange(4), 8)
    for call, error, word in [
        (lambda: rotary_embedding(x, cos, sin), ValueError, "cos: want at least 5 rows"),
        (lambda: rotary_embedding(x[..., :6], cos, sin), ValueError, "cos: want at most 3"),
        (lambda: rotary_embedding(x, cos, sin[:3]), ValueError, "sin: want shape"),
        (
            lambda: rotary_embedding(x, cos, sin, positions=torch.zeros(5)),
            TypeError,
            "positions: want int32",
        ),
        (
            lambda: rotary_embedding(x, cos, sin, positions=torch.zeros(2, 4).long()),
            ValueError,
            "positions: want shape",
        ),
        (lambda: rotary_tables(torch.arange(4), 7), ValueError, "dim: want an even number"),
        (lambda: rotary_tables(torch.arange(4), 8, xpos=0), ValueError, "xpos: want tokens"),
        (lambda: rotary_tables(torch.arange(4), 8, dtype=torch.int32), TypeError, "dtype: want"),
    ]:
        with pytest.raises(error, match=word):
            call()


@pytest.mark.parametrize("wrong", [-1, 20, 1 << 40])
def test_rotary_refuses_positions_outside_of_the_table(wrong: int) -> None:
    cos, sin = rotary_tables(torch.arange(20), 8)
    x, positions = torch.randn(2, 5, 3, 8), torch.arange(5).repeat(2, 1)
    positions[1, 2] = wrong
    word = rf"positions: id {wrong} at position \(1, 2\) is outside the table of 20"
    with pytest.raises(ValueError, match=word):
        rotary_embedding(x, cos, sin, positions=positions)


@pytest.mark.parametrize("offsets", [[2, 5], [0, 4], [0, 6], [0, 4, 3, 5]])
def test_packed_positions_refuses_offsets_that_do_not_fit(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: want offsets"):
        packed_positions(torch.tensor(offsets), 5)


def test_tables_of_a_step_are_each_calls_own() -> None:
    """Made once for the same positions, features, base and dtype."""
    first = torch.arange(4), 8, 1e4, torch.float32
    others = [(0, torch.arange(4) + 1), (1, 6), (2, 1e6), (3, torch.float64)]
    calls = [first, *((*first[:i], x, *first[i + 1 :]) for i, x in others)]
    with decoding.step():
        made = [decoding.tables(*call) for call in calls]
        assert decoding.tables(*first) is made[0]
    for (positions, dim, base, dtype), got in zip(calls, made, strict=True):
        want = rotary_tables(positions, dim, base=base, dtype=dtype)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@wants.triton
@pytest.mark.parametrize("wider", [(0, 0, 0, 0), (0, 0, 0, 2), (0, 0, 1, 0), (0, 1, 0, 0)])
def test_copies_go_to_any_strides(wider: tuple[int, ...]) -> None:
    from slipstream.kernels.elementwise.triton.rotary import _copy

    y = torch.randn(2, 3, 4, 8).bfloat16()
    x = torch.zeros([n + more for n, more in zip(y.shape, wider)]).bfloat16()
    x = x[:, : y.shape[1], : y.shape[2], : y.shape[3]]
    _copy(x, y)
    assert torch.equal(x, y)
    _copy(x.mT, 2 * y.mT)  # columns of it
    assert torch.equal(x, 2 * y)


def test_short_convolution_update_continues_a_sequence_in_place() -> None:
    x, weight, bias = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6)
    whole, end = short_convolution(x, weight, bias, activation="silu", output_final_state=True)
    _, state = short_convolution(x[:, :5], weight, output_final_state=True)
    assert state is not None
    for t in range(5, 9):
        token = x[:, t] if t % 2 else x[:, t : t + 1]
        y = short_convolution_update(token, state, weight, bias, activation="silu")
        assert y.shape == token.shape
        torch.testing.assert_close(y.view(2, 6), whole[:, t])
    assert torch.equal(state, end)


def test_short_convolution_keeps_packed_neighbours_apart() -> None:
    x, weight = torch.randn(1, 20, 6), torch.randn(6, 4)
    offsets = torch.tensor([0, 7, 12, 20])
    x[:, 7:12] = torch.nan
    x.requires_grad_()
    y, state = short_convolution(x, weight, cu_seqlens=offsets, output_final_state=True)
    assert state is not None
    assert y[:, :7].isfinite().all()
    assert y[:, 12:].isfinite().all()
    assert state[[0, 2]].isfinite().all()
    dy = torch.zeros_like(y)
    dy[:, 7:12] = torch.nan
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx[:, :7].isfinite().all()
    assert dx[:, 12:].isfinite().all()


@pytest.mark.parametrize("width", [1, 2, 8])
def test_packed_convolution_of_any_width_has_gradients(width: int) -> None:
    shapes = (1, 7, 3), (3, width), (3,), (3, 3, width)
    leaves = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> Any:
        cu = torch.tensor([0, 2, 2, 7])
        return short_convolution(
            x, w, b, initial_state=state, output_final_state=True, cu_seqlens=cu
        )

    assert torch.autograd.gradcheck(call, tuple(leaves))


def test_short_convolution_ignores_autocast() -> None:
    x, weight = torch.randn(1, 20, 6), torch.randn(6, 4)
    want = short_convolution(x, weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(short_convolution(x, weight)[0], want)


def test_windows_past_the_pool_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the error comes with a later call."""
    monkeypatch.setattr(eager.token_ids, "expect_below", lambda *_: None)
    state, tokens = torch.randn(3, 2, 4), torch.randn(4, 2)
    before = state.clone()
    window, live = eager._move_on(tokens, state, torch.tensor([2, 3, -1, 0]))
    assert live is not None and live.tolist() == [True, False, False, True]
    for row, n in ((0, 2), (3, 0)):
        before[n] = torch.cat([before[n, :, 1:], tokens[row, :, None]], -1)
        torch.testing.assert_close(window[row], before[n])
    torch.testing.assert_close(state, before)
