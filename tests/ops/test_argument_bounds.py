"""Arguments at their bounds: the last value that is taken, the first that is refused by name; no
batch, tokens, sequences, rows or features at all, forward and backward. Offsets, lengths, indices,
pages and targets as views, whose kernels read them by pointers: a column of a table, or every other
number."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import layers, nn, ops
from slipstream.compat.flash_attn.bert_padding import unpad_input
from slipstream.models import SlipstreamConfig
from slipstream.models.prefixes import PrefixCache
from slipstream.tools import precompile_cache
from slipstream.tools.catalog import OPERATORS, Sample, Shape, flat
from slipstream.training import config
from tests.support.interpreted import interpreted
from tests.support.operators import LINEAR, TESTED, Size, block_size, leaves, packed

X = torch.randn(1, 4, 2, 8)
ROWS, CLASSES = torch.randn(4, 8), torch.randn(5, 8)


def shape(*sizes: int) -> Tensor:
    return torch.rand(sizes)


def angles(columns: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, columns), torch.zeros(rows, columns)


# by the argument's name in the refusal: a call, the last value that it takes, the first it does not
CASES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "window_size": (lambda n: ops.attention(X, X, X, window_size=n), 1, -1),
    "softcap": (lambda n: ops.attention(X, X, X, softcap=n), 0.0, -0.5),
    "residuals": (lambda d: ops.attnres(ROWS[0], shape(*d), ROWS[0]), (3, 8), (8,)),
    "temperature": (
        lambda t: ops.linear_kl_div(ROWS, CLASSES, ROWS, CLASSES, temperature=t), 1e-2, 0.0,
    ),
    "temperature of log_probs": (
        lambda t: ops.linear_log_probs(ROWS, CLASSES, torch.arange(4), temperature=t), 1e-2, 0.0,
    ),
    "a": (lambda d: ops.matmul(shape(*d), CLASSES.mT), (4, 8), (8,)),
    "x of norms": (lambda d: ops.rms_norm(shape(*d)), (8,), ()),
    "eps": (lambda eps: ops.rms_norm(ROWS, eps=eps), 0.0, -1e-6),
    "cos": (lambda n: ops.rotary_embedding(X, *angles(n)), 4, 5),
    "cos of tokens": (lambda n: ops.rotary_embedding(X, *angles(4, n)), 4, 3),
    "dim": (lambda n: ops.rotary_tables(torch.arange(4), n), 0, -2),
    "base": (lambda x: ops.rotary_tables(torch.arange(4), 8, base=x), 1e-3, 0.0),
    "xpos": (lambda x: ops.rotary_tables(torch.arange(4), 8, xpos=x), 1e-3, 0.0),
    "dim of the module": (lambda n: nn.RotaryEmbedding(n), 0, -2),
    "num_groups": (lambda n: nn.GroupNorm(n, 8)(ROWS), 1, 0),
    "rotary_cos": (
        lambda n: ops.flash_attn_with_kvcache(
            X, X.clone(), X.clone(), X[:, :1], X[:, :1], *angles(n),
            cache_seqlens=torch.tensor([3], dtype=torch.int32),
        ), 4, 5,
    ),
    "k_cache": (
        lambda n: ops.flash_attn_with_kvcache(X, shape(n, 4, 2, 8), shape(n, 4, 2, 8)), 1, 0,
    ),
    "hidden_states": (
        lambda d: unpad_input(shape(*d), torch.ones(d[:2])), (4, 3), (4,),
    ),
    "num_layers": (lambda n: layers.LightningAttention(8, 2, num_layers=n, layer_idx=1), 2, 1),
    "input_ids": (
        lambda n: PrefixCache(mock.MagicMock()).prefill(torch.zeros(1, n).long()), 1, 0,
    ),
    "every": (lambda n: PrefixCache(None, n), 64, 0),
    "vocab_size": (lambda n: SlipstreamConfig(vocab_size=n), 1, 0),
    "hidden_size": (lambda n: SlipstreamConfig(hidden_size=n, num_heads=1), 1, 0),
    "intermediate_size": (lambda n: SlipstreamConfig(intermediate_size=n), 0, -1),
    "attention_residuals": (lambda n: SlipstreamConfig(attention_residuals=n), 1, 0),
    "batch": (precompile_cache.batch, "1x2", "1x1"),
    "batch of rows": (precompile_cache.batch, "1x2", "0x2"),
    "tokenizer.vocab_size": (lambda n: config.Tokenizer(vocab_size=n), 257, 256),
    "data.row_tokens": (lambda n: config.Data(files=("a",), row_tokens=n), 2, 1),
    "data.lanes": (lambda n: config.Data(files=("a",), lanes=n), 1, 0),
    "parallel.data": (lambda n: config.Parallel(data=n), 0, -1),
    "parallel.shard": (lambda n: config.Parallel(shard=n), 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_argument_is_taken_at_its_bound(name: str) -> None:
    call, last, beyond = CASES[name]
    call(last)
    with pytest.raises(ValueError, match=name.partition(" of ")[0]):
        call(beyond)


Args = dict[str, Any]
# those of the default run: one of each way to the kernels
ONE_OF_EACH = {"chunk_gla", "chunk_linear_attn-normalize", "chunk_gsa", "fused_recurrent_hgrn"}
ONE_OF_EACH |= {"chunk_gated_delta_product", "fused_recurrent_rwkv6", "chunk_kda"}


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


NO_SIZES = {"rows": block_size(0, 6), "batch": replace(block_size(5, 6), B=0)}
NO_SIZES["features"] = block_size(5, 0)


@pytest.mark.parametrize("op", [x for x in TESTED if x not in LINEAR], ids=lambda op: op.name)
def test_block_of_the_catalogue_takes_empty_inputs(op: Sample) -> None:
    none = {"sequences": packed(block_size(0, 6))} if op.packed else {}
    for what, size in {**NO_SIZES, **none}.items():
        if what == "features" and op.op == "rotary_embedding":
            continue  # whose tables are made for a width
        if op.packed and what == "rows":
            size = packed(size, 0, 0)
        args = op.inputs(size)
        if what == "features" and op.op in ("attention", "index_loss"):
            with pytest.raises(ValueError, match="q: want at least one feature, or a scale"):
                op.call(args)
        else:
            assert_empty_has_gradients(op.call, args)


NOTHING: dict[str, Callable[[], Args]] = {
    "matmul": lambda: {"a": shape(3, 4), "b": shape(4, 0)},
    "embedding": lambda: {"input_ids": torch.zeros(0, 5).long(), "weight": shape(0, 3)},
    "glu_linear": lambda: {"gate": shape(2, 0), "up": shape(2, 0), "weight": shape(5, 0)},
}


@pytest.mark.parametrize("name", NOTHING)
def test_block_makes_nothing_of_nothing(name: str) -> None:
    assert_empty_has_gradients(lambda args: getattr(ops, name)(**args), NOTHING[name]())


EMPTY_SIZES = {
    "no sequences": packed(Size()),
    "empty sequences": packed(Size(), 0, 5, 0),
    "no keys": Size(T=9, K=0),
    "no values": Size(T=9, V=0),
}


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


# one of each kernel that reads some
SOME = (
    "attention-lengths attention-packed chunk_gla chunk_hgrn chunk_rwkv4 cross_entropy-none "
    "flash_attn_with_kvcache fused_recurrent_gla latent_attention linear_log_probs mixer_step "
    "recurrent_step rotary_embedding-positions selective_scan-groups short_convolution-packed "
    "short_convolution_update token_shift-packed"
)
# arguments that no row has
MORE: dict[str, Mapping[str, Any]] = {
    "flash_attn_with_kvcache": {"cache_batch_idx": [1, 0], "cache_leftpad": [0, 1]},
    "latent_attention": {"table": [[1, 0], [0, 1]]},
    "mixer_step": {"state_indices": [1, 0]},
    "short_convolution_update": {"state_indices": [1, 0]},
}
SHAPE = Shape(B=2, T=6, H=2, K=16, V=16, M=4, D=8, C=24, Z=11, dtype=torch.float32, state=True)


def stepped(x: Any) -> Any:
    """A view of integers with ones between them."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        return x
    return torch.stack([torch.ones_like(x), x], -1)[..., 1]


def check(op: Sample, shape: Shape) -> None:
    torch.manual_seed(0)
    more = {n: torch.tensor(x, dtype=torch.int32) for n, x in MORE.get(op.name, {}).items()}
    args = op.inputs(shape) | more
    views = {name: stepped(x) for name, x in args.items()}
    assert any(x is not args[name] for name, x in views.items()), op.name
    impl = "triton" if "impl" in op.takes else None
    for got, want in zip(op.call(views, impl), op.call(args, impl), strict=True):
        assert torch.equal(got, want), op.name


@interpreted
@pytest.mark.parametrize(
    "names", [SOME, pytest.param("", marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_kernels_take_integers_of_any_strides(names: str) -> None:
    rows = [x for x in OPERATORS if not x.random and not set("LX") & set("".join(x.dims.values()))]
    assert {*names.split()} <= {x.name for x in rows}
    for op in rows:
        packs = "cu_seqlens" in op.takes and not op.op.startswith("attention")
        reads = packs or op.of_one_dtype or op.packed or op.name in MORE
        if reads and (op.name in names.split() or not names):
            check(op, replace(SHAPE, packed=packs))
