"""What is remembered of a call is not taken for one that autocast or an option tells from it;
decays of heads are made once, and again where autograd or a graph would own them."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from slipstream import ops
from slipstream.kernels.attention import run
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.ops import gated_delta_product
from slipstream.ops._preprocess import per_head
from slipstream.runtime.consistent import consistent
from slipstream.runtime.dispatch import ValidationCache
from slipstream.tools.catalog import OPERATORS, Sample
from tests.support.operators import TESTED, Size

NAMES = {x.name for x in OPERATORS} - {f"fused_recurrent_{x}" for x in ("hgrn", "mamba3", "rwkv4")}
SIZE = Size(T=6, K=12, V=12, D=24, C=12)
# scans of gates alone have one plan for both
RECURRENT = [
    x
    for x in OPERATORS
    if x.name.startswith("chunk") and x.name.replace("chunk", "fused_recurrent") in NAMES
]
# no autocast for these, or one before the plan is asked for
AS_GIVEN = ("mixer_step", "rwkv7_step", "selective_scan", "chunk_linear_attn-normalize")
AS_GIVEN += ("chunk_hgrn", "fused_recurrent_hgrn", "chunk_rwkv4", "fused_recurrent_rwkv4")


def outcome(op: Sample, autocast: bool, mixed: bool) -> list[Tensor] | str:
    """Outputs, or what a call is refused with. mixed: the first tensor is in another dtype."""
    torch.manual_seed(0)
    args = op.inputs(Size(T=6, K=8, V=8, D=12, C=12))
    if mixed:
        first = next(iter(op.dims))
        args[first] = args[first].bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        try:
            return op.call(args)
        except TypeError as error:
            return str(error)


@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "mixed"])
@pytest.mark.parametrize("op", TESTED, ids=lambda x: x.name)
def test_remembered_call_is_of_the_same_autocast(op: Sample, mixed: bool) -> None:
    with mock.patch.object(ValidationCache, "get", lambda self, key, make, *_: make()):
        want = [outcome(op, autocast, mixed) for autocast in (False, True)]
    for autocast in (False, True, False):
        got, right = outcome(op, autocast, mixed), want[autocast]
        if isinstance(got, str) or isinstance(right, str):
            assert got == right
            continue
        for x, y in zip(got, right, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def keys_of(op: Sample, args: dict[str, Any], **options: Any) -> set[tuple]:
    """What a call asks for of what is remembered."""
    found: set[tuple] = set()

    def get(cache: ValidationCache, key: tuple, make: Any, *_: Any) -> Any:
        found.add((id(cache), key))
        return make()

    with torch.no_grad(), mock.patch.object(ValidationCache, "get", get):
        op(args, **options)
    return found


@pytest.mark.parametrize("op", OPERATORS, ids=lambda x: x.name)
def test_remembered_call_is_of_the_same_options(op: Sample) -> None:
    """Those that choose kernels; some parts of a call have no chunks."""
    args = op.inputs(SIZE)
    plain = keys_of(op, args)
    if "impl" in op.takes:
        assert not keys_of(op, args, impl="eager") & plain
    if "chunk_size" in op.takes:
        assert keys_of(op, args, chunk_size=32) - keys_of(op, args, chunk_size=64)
    if "state" in op.written and "state_indices" in op.takes:  # kernels read its strides
        turned = args["state"].mT.contiguous().mT
        assert not keys_of(op, {**args, "state": turned}) & plain
    lacks = not op.options.get("causal", True) or {"dropout", "selected"} & {*op.name.split("-")}
    if "consistent" in op.takes and not lacks:
        with consistent():
            assert keys_of(op, args) - plain
    if plain and not op.name.startswith(AS_GIVEN):
        with torch.autocast("cpu", torch.bfloat16):
            found = keys_of(op, args)
        # of these some parts are in one dtype, whatever is asked for
        assert found - plain and (op.op.endswith(("gsa", "mamba3")) or not found & plain)


@pytest.mark.parametrize("op", RECURRENT, ids=lambda x: x.name)
def test_remembered_call_is_not_of_the_recurrent_operator(op: Sample) -> None:
    (other,) = (x for x in OPERATORS if x.name == op.name.replace("chunk", "fused_recurrent"))
    assert not keys_of(other, other.inputs(SIZE)) & keys_of(op, op.inputs(SIZE))


def test_remembered_product_is_of_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    monkeypatch.setattr(gated_delta_product._PLANS, "get", lambda key, *_: keys.append(key))
    k, beta = torch.rand(1, 8, 1, 8), torch.rand(1, 8, 1)
    for n in (2, 3):
        with suppress(ValueError):
            ops.chunk_gated_delta_product(k[:, :4], k, k, None, beta, n)
    assert len({*keys}) == 2


def test_remembered_attention_is_of_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across ranks or not, and of keys that are packed as the queries are, or by themselves."""
    keys = []
    monkeypatch.setattr(run._PLANS, "get", lambda key, *_: keys.append(key))
    qkv, asked, own = [torch.empty(1, 6, 2, 8)] * 3, run.Asked(), torch.tensor([0, 6])
    for offsets in (None, torch.zeros(2), torch.zeros(3)):
        context: Any = SimpleNamespace(whole_offsets_on=lambda _, x=offsets: x)
        run.plan_of(AttentionInputs(*qkv), AttentionOptions(1.0), asked, context)
    run.plan_of(AttentionInputs(*qkv), AttentionOptions(1.0), asked)
    for of_keys in (own, own.clone()):
        run.plan_of(AttentionInputs(*qkv, cu_q=own, cu_k=of_keys), AttentionOptions(1.0), asked)
    with consistent():
        run.plan_of(AttentionInputs(*qkv), AttentionOptions(1.0), asked)
    assert len({*keys}) == 7


MADE: list[float] = []


def doubled(h: Tensor, by: float) -> Tensor:
    MADE.append(by)
    return h * by


def test_per_head_formula_is_cached() -> None:
    v = torch.zeros(1, 3, 5, 4)
    MADE.clear()
    first, again = per_head(v, doubled, 2.0), per_head(v.clone(), doubled, 2.0)
    assert first is again and first.dtype == torch.float32 and first.tolist() == [0, 2, 4, 6, 8]
    assert per_head(v.double(), doubled, 2.0).dtype == torch.float64
    assert per_head(v, doubled, 3.0).tolist() == [0, 3, 6, 9, 12]
    assert per_head(v[:, :, :2], doubled, 2.0).tolist() == [0, 2]
    assert MADE == [2.0, 2.0, 3.0, 2.0]


def test_per_head_cache_skips_fake_tensors() -> None:
    MADE.clear()
    with FakeTensorMode():
        assert isinstance(per_head(torch.zeros(1, 3, 7, 4), doubled, 2.0), FakeTensor)
    real = per_head(torch.zeros(1, 3, 7, 4), doubled, 2.0)
    assert not isinstance(real, FakeTensor) and MADE == [2.0, 2.0]


def test_per_head_made_in_inference_mode() -> None:
    given = [torch.randn(1, 3, 11, 4) for _ in range(3)]
    with torch.inference_mode():
        ops.chunk_lightning_attn(*given, 1, 4)
    live = [x.requires_grad_() for x in given]
    ops.chunk_lightning_attn(*live, 1, 4)[0].sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in live)
