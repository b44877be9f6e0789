"""No batch, tokens, sequences, rows or features: every operator, forward and backward."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.tools.catalog import Sample, flat
from tests.support.operators import LINEAR, TESTED, Size, block_size, leaves, packed

Args = dict[str, Any]
# those of the default run: one of each way to the kernels
ONE_OF_EACH = {"chunk_gla", "chunk_linear_attn-normalize", "chunk_gsa", "fused_recurrent_hgrn"}
ONE_OF_EACH |= {"chunk_gated_delta_product", "fused_recurrent_rwkv6", "chunk_kda"}


def _shifted(**args: Any) -> Any:
    return ops.token_shift(**args, output_final_state=True)


def _empty_blocks() -> dict[str, tuple[Callable[..., Any], Args]]:
    """The blocks with no batch, no tokens, no sequences, no rows or no features."""
    rand, none = torch.randn, torch.zeros(0, 5, dtype=torch.long)
    found: dict[str, tuple[Callable[..., Any], Args]] = {}
    for N in (0, 2):
        offsets = {"cu_seqlens": torch.zeros(N + 1, dtype=torch.int32)}
        for stated in (False, True):
            state = {"initial_state": rand(N, 3, 2)} if stated else {}
            args = {"x": rand(1, 0, 3), "weight": rand(3, 2), **offsets, **state}
            found[f"short_convolution-{N}-{stated}"] = ops.short_convolution, args
            state = {"initial_state": rand(N, 3)} if stated else {}
            args = {"x": rand(1, 0, 3), **offsets, **state}
            found[f"token_shift-{N}-{stated}"] = _shifted, args
        for width in (5, 6):
            qkv = {"q": rand(1, 0, 4, 6), "k": rand(1, 0, 2, 6), "v": rand(1, 0, 2, width)}
            found[f"attention-{N}-{width}"] = ops.attention, {**qkv, **offsets}
    cos, sin = ops.rotary_tables(torch.arange(9), 4)
    for B, T in ((0, 5), (2, 0), (0, 0)):
        x, wide = rand(B, T, 4), rand(B, T, 2, 6)
        rows = {"weight": rand(7, 4), "target": torch.zeros(B, T, dtype=torch.long)}
        size = f"{B}-{T}"
        found |= {
            f"short_convolution-{size}": (ops.short_convolution, {"x": x, "weight": rand(4, 2)}),
            f"token_shift-{size}": (ops.token_shift, {"x": x}),
            f"attention-{size}": (ops.attention, {"q": wide, "k": wide, "v": wide}),
            f"rms_norm-{size}": (ops.rms_norm, {"x": x, "weight": rand(4), "residual": x}),
            f"rotary-{size}": (lambda x: ops.rotary_embedding(x, cos, sin), {"x": wide}),
            f"swiglu-{size}": (ops.swiglu, {"gate": x, "up": x}),
            f"glu_linear-{size}": (ops.glu_linear, {"gate": x, "up": x, "weight": rand(3, 4)}),
            f"cross_entropy-{size}": (ops.cross_entropy, {"logits": x, "target": rows["target"]}),
            f"linear_cross_entropy-{size}": (ops.linear_cross_entropy, {"hidden": x, **rows}),
        }
    found |= {
        "embedding": (ops.embedding, {"input_ids": none, "weight": rand(7, 3)}),
        "embedding-no-rows": (ops.embedding, {"input_ids": none, "weight": rand(0, 3)}),
        "rms_norm-narrow": (ops.rms_norm, {"x": rand(2, 0), "weight": rand(0)}),
        "glu_linear-narrow": (
            ops.glu_linear, {"gate": rand(2, 0), "up": rand(2, 0), "weight": rand(5, 0)}
        ),
        **{f"matmul-{m}{n}{k}": (ops.matmul, {"a": rand(m, k), "b": rand(k, n)})
           for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0))},
    }  # fmt: skip
    return found


EMPTY = _empty_blocks()


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, tuple | list):
        return [x for y in outputs for x in _tensors(y)]
    return [] if outputs is None else [outputs]


def assert_empty_has_gradients(call: Callable[[Args], Any], args: Args) -> None:
    args, inputs = leaves(args)
    outputs = _tensors(call(args))
    total = sum((x.double().sum() for x in outputs), torch.zeros(()))
    grads = torch.autograd.grad(total, inputs)
    assert [x.shape for x in grads] == [x.shape for x in inputs]
    assert not any(x.isnan().any() for x in (*outputs, *grads))


@pytest.mark.parametrize("name", EMPTY)
def test_block_takes_empty_inputs(name: str) -> None:
    call, args = EMPTY[name]
    assert_empty_has_gradients(lambda args: call(**args), args)


NO_SIZES = {"rows": block_size(0, 6), "batch": replace(block_size(5, 6), B=0)}
NO_SIZES["features"] = block_size(5, 0)


@pytest.mark.parametrize("op", [x for x in TESTED if x not in LINEAR], ids=lambda op: op.name)
def test_block_of_the_catalogue_takes_empty_inputs(op: Sample) -> None:
    for what, size in NO_SIZES.items():
        if what == "features" and op.op == "rotary_embedding":
            continue  # whose tables are made for a width
        if op.packed and what == "rows":
            size = packed(size, 0, 0)
        args = op.inputs(size)
        if what == "features" and op.op == "attention":
            with pytest.raises(ValueError, match="q: want at least one feature, or a scale"):
                op.call(args)
        else:
            assert_empty_has_gradients(op.call, args)


EMPTY_SIZES = {
    "no sequences": packed(Size()), "empty sequences": packed(Size(), 0, 5, 0),
    "no keys": Size(T=9, K=0), "no values": Size(T=9, V=0),
}  # fmt: skip


@pytest.mark.parametrize("size", EMPTY_SIZES.values(), ids=EMPTY_SIZES.keys())
@pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)
@pytest.mark.sample(which=lambda op, size: op.name in ONE_OF_EACH)
def test_operator_takes_empty_inputs(op: Sample, size: Size) -> None:
    assert_empty_has_gradients(op, op.inputs(replace(size, state=False)))
    args = op.inputs(size)
    assert_empty_has_gradients(op, args)
    torch.testing.assert_close(
        flat(op(args)), flat(op(args, impl="reference")), rtol=1e-4, atol=1e-4
    )
