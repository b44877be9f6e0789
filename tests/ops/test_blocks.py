"""What holds for every building block around attention."""

import pytest
import torch
from torch import Tensor

from tests.support.blocks import BLOCKS, Block, cast, leaves

every_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
EPS = {torch.float64: 2.2e-16, torch.float32: 1.2e-7, torch.float16: 9.8e-4, torch.bfloat16: 7.8e-3}


def with_grads(run, args, *, wide: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    args, inputs = leaves(args)
    outputs = run(args)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    total = sum(((x.double() * w).sum() for x, w in zip(outputs, weights)), torch.zeros(()))
    return [x.detach() for x in outputs], list(torch.autograd.grad(total, inputs))


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Relative to the largest value, at least one."""
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        size = float(y.abs().max()) if y.numel() else 0.0
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=tolerance * max(size, 1.0))


@every_block
@pytest.mark.parametrize(("T", "D"), [(1, 6), (7, 12), (100, 30)])
def test_block_matches_reference(block: Block, T: int, D: int) -> None:
    args = block.inputs(T, D)
    got, grads = with_grads(block, args)
    want, want_grads = with_grads(block.want, cast(args, torch.float64))
    assert_near(got, want, 64 * EPS[torch.float32])
    # a parameter's gradient sums over T rows
    assert_near(grads, want_grads, 64 * EPS[torch.float32] * T**0.5)


@every_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_block_in_16_bit_rounds_about_once(block: Block, dtype: torch.dtype) -> None:
    args = cast(block.inputs(20, 12), dtype)
    got, grads = with_grads(block, args)
    want, want_grads = with_grads(block.want, cast(args, torch.float64))
    assert_near(got, want, 4 * EPS[dtype])
    assert_near(grads, want_grads, 8 * EPS[dtype])


@every_block
def test_block_gradcheck(block: Block) -> None:
    args, inputs = leaves(cast(block.inputs(5, 6), torch.float64))
    names = [name for name, x in args.items() if any(x is y for y in inputs)]
    torch.autograd.gradcheck(
        lambda *tensors: tuple(block({**args, **dict(zip(names, tensors))})), inputs
    )


@every_block
@pytest.mark.parametrize("T", [0, 1])
def test_block_takes_nothing(block: Block, T: int) -> None:
    if T == 0 and block.name.startswith("attention-") and block.name != "attention-packed":
        pytest.skip("its table row has keys without queries")
    got, grads = with_grads(block, block.inputs(T, 6))
    assert not any(x.isnan().any() for x in (*got, *grads))


@every_block
def test_block_takes_any_strides(block: Block) -> None:
    args = block.inputs(9, 6)
    want, want_grads = with_grads(block, args)

    def spread(args):
        wide = {}
        for name, x in args.items():
            if isinstance(x, Tensor) and x.is_floating_point():
                wide[name] = torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
            else:
                wide[name] = x
        return wide

    got, grads = with_grads(lambda args: block(spread(args)), args)
    assert_near(got, want, 64 * EPS[torch.float32])
    assert_near(grads, want_grads, 64 * EPS[torch.float32])


# seconds a block: each of them traced and a few through Inductor; variants and the rest are slow
INDUCTOR = {"rms_norm_gated-silu", "short_convolution-packed", "linear_cross_entropy-mean"}
TRACED = {"rms_norm_gated-mamba2", "cross_entropy-mean", "linear_cross_entropy-none"}
TRACED |= {"token_shift-packed", "attention-packed-cache"}


# torch's own: of importing Inductor, and of Dynamo making an autograd.Function's ctx
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("block", "backend"),
    [
        pytest.param(
            block,
            backend,
            id=f"{block.name}-{backend}",
            marks=() if block.name in sample else pytest.mark.slow,
        )
        for backend, sample in (
            ("aot_eager", TRACED | {b.name for b in BLOCKS if "-" not in b.name}),
            ("inductor", INDUCTOR),
        )
        for block in BLOCKS
    ],
)
def test_block_compiles_fullgraph_without_recompiling(block: Block, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for n, T in enumerate((15, 31, 14)):
        args = block.inputs(T, 6)
        want, want_grads = with_grads(block, args)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got, grads = with_grads(compiled, args)
        assert_near(got, want, 256 * EPS[torch.float32])
        assert_near(grads, want_grads, 256 * EPS[torch.float32])


@every_block
def test_block_exports(block: Block) -> None:
    args = block.inputs(9, 6)

    class Module(torch.nn.Module):
        def forward(self, args):
            return block(args)

    program = torch.export.export(Module(), (args,))
    for x, y in zip(program.module()(args), block(args), strict=True):
        torch.testing.assert_close(x, y)
