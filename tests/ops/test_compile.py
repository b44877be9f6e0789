"""torch.compile, torch.export and opcheck of every operator."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.linear import gsa
from slipstream.kernels.linear import op as linear_op
from slipstream.kernels.linear.inputs import LinearInputs
from slipstream.tools.catalog import Sample, flat
from tests.support.operators import LINEAR, Size, leaves, offsets, packed, relative_error

every_operator = pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)
# one operator of each way through the common path; the rest are slow
SAMPLE = {"chunk_gated_delta_rule", "chunk_linear_attn-normalize", "chunk_gsa", "chunk_hgrn"}
SAMPLE |= {"fused_recurrent_rwkv6"}
sampled = pytest.mark.sample(which=lambda op: op.name in SAMPLE)


def is_compiled(op: Sample, backend: str, is_packed: bool) -> bool:
    """Inductor, which takes ten times as long, sees the same opaque operators: once."""
    if backend == "inductor":
        return op.name == "chunk_gated_delta_rule" and is_packed
    return op.name in SAMPLE


def _grads(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(sum(x.double().sum() for x in outputs), inputs))


@pytest.mark.sample(which=is_compiled)
@every_operator
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_operator_compiles_fullgraph_without_recompiling(
    op: Sample, backend: str, is_packed: bool
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda args: flat(op(args)), fullgraph=True, dynamic=True, backend=backend
    )
    lengths = [(20, 13), (50, 27), (5, 6)]
    for n, (a, b) in enumerate(lengths):
        size = packed(Size(), a, b) if is_packed else Size(T=a + b)
        args, inputs = leaves(op.inputs(size))
        want = flat(op(args))
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            got = compiled(args)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(_grads(got, inputs), _grads(want, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["chunk_mamba3-mimo", "chunk_gdn2"])
def test_prologues_compile_in_16_bits(name: str) -> None:
    """Tensors rounded between operations of torch have the strides that were traced."""
    (op,) = [x for x in LINEAR if x.name == name]
    torch.compiler.reset()
    compiled = torch.compile(lambda args: flat(op(args)), fullgraph=True, backend="aot_eager")
    args, inputs = leaves(op.inputs(replace(Size(T=21), dtype=torch.bfloat16)))
    got, want = compiled(args), flat(op(args))
    for x, y in zip([*got, *_grads(got, inputs)], [*want, *_grads(want, inputs)], strict=True):
        assert relative_error(x, y) <= 1e-2


def test_one_argument_alone_may_have_a_dynamic_size() -> None:
    (op,) = [x for x in LINEAR if x.name == "chunk_gdn2"]
    args = op.inputs(Size(T=21))
    want = flat(op(args))
    for one in (n for n in args if args[n].dim() > 2 and args[n].shape[1] == 21):
        torch.compiler.reset()
        given = {**args, one: args[one].clone()}
        torch._dynamo.maybe_mark_dynamic(given[one], 1)
        compiled = torch.compile(lambda args: flat(op(args)), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(given), want)


def test_compiled_operators_take_one_tensor_twice() -> None:
    x = torch.randn(1, 9, 2, 8, requires_grad=True)
    h = torch.zeros(4, 2, requires_grad=True)

    def call(x: Tensor, h: Tensor) -> Tensor:
        o, _ = ops.chunk_retention(x, x, x)
        y, _ = ops.chunk_gdn2(x, 2 * x, x, -x.abs(), x.sigmoid(), w=x.sigmoid())
        z = ops.swiglu(x, x) + ops.attention(x, k=x, v=x) + ops.rms_norm(x, residual=x)
        return (o + y + z).sum() + ops.matmul(h, h.t(), residual=h @ h.t()).sum()

    torch.compiler.reset()
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(x, h)
    want = call(x, h)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got, (x, h)), torch.autograd.grad(want, (x, h)), rtol=1e-4, atol=1e-5
    )


@sampled
@every_operator
def test_operator_exports_with_gradients(op: Sample) -> None:
    args, inputs = leaves(op.inputs(Size(T=20)))

    class Module(torch.nn.Module):
        def forward(self, args: dict[str, Any]) -> list[Tensor]:
            return flat(op(args))

    program = torch.export.export(Module(), (args,))
    got, want = program.module()(args), flat(op(args))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(_grads(got, inputs), _grads(want, inputs), rtol=1e-4, atol=1e-4)


def _terms(**extra: Tensor) -> LinearInputs:
    q, k = torch.randn(1, 20, 2, 8), torch.randn(1, 20, 2, 8)
    return LinearInputs(q, k, torch.randn(1, 20, 4, 6), **extra)


TERMS = {
    "additive": lambda: _terms(),
    "scalar delta packed": lambda: _terms(
        g=-torch.rand(1, 20, 4),
        beta=torch.rand(1, 20, 4),
        initial_state=torch.randn(2, 4, 8, 6),
        cu_seqlens=offsets((7, 13)),
    ),
    "channel dplr": lambda: _terms(
        g=-torch.rand(1, 20, 4, 8), a=torch.randn(1, 20, 2, 8), b=torch.zeros(1, 20, 2, 8)
    ),
    "bonus": lambda: _terms(g=-torch.rand(1, 20, 4, 8), u=torch.randn(4, 8)),
}


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("make", TERMS.values(), ids=TERMS.keys())
def test_linear_ops_pass_opcheck(make: Any, chunk: int) -> None:
    terms = make()
    torch.library.opcheck(linear_op.call_forward.overload, (*terms, 0.5, chunk, "eager", False))
    dout = torch.randn_like(terms.v)
    for gate_gradient in (True, False):
        args = (*terms, dout, None, 0.5, chunk, "eager", gate_gradient)
        torch.library.opcheck(linear_op.call_backward.overload, args)


def test_passes_of_gsa_are_cut_within_a_graph() -> None:
    """As a call on CUDA is traced, of sizes that may change."""

    def cut(x: Tensor) -> Tensor:
        groups = gsa._groups(gsa.GSAInputs(x, x, x, x, x), "triton", "triton", False)
        return x if groups is None else x + groups.heads

    x = torch.ones(1, 70, 2, 16)
    compiled = torch.compile(cut, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(x), x)
