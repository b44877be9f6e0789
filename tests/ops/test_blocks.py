"""Properties of every building block around attention."""

from functools import partial

import pytest
import torch
from torch import Tensor

from slipstream.tools.catalog import Sample
from tests.support.formulas import wanted
from tests.support.operators import BLOCKS, EPS, block_size, cast, leaves, with_grads

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


@every_block
def test_block_gradcheck(block: Sample) -> None:
    args, inputs = leaves(block.inputs(block_size(5, 6, torch.float64)))
    names = [name for name, x in args.items() if any(x is y for y in inputs)]
    torch.autograd.gradcheck(
        lambda *tensors: tuple(block.call({**args, **dict(zip(names, tensors))})),
        inputs,
        fast_mode=True,
    )


@every_block
def test_block_takes_any_strides(block: Sample) -> None:
    args = block.inputs(block_size(9, 6))
    want, want_grads = with_grads(block.call, args)

    def spread(args):
        wide = {}
        for name, x in args.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                wide[name] = torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
            else:
                wide[name] = x
        return wide

    got, grads = with_grads(lambda args: block.call(spread(args)), args)
    assert_near(got, want, 64 * EPS[torch.float32])
    assert_near(grads, want_grads, 64 * EPS[torch.float32])


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
