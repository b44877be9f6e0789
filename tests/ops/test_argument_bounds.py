"""Arguments at their bounds: the last value that is taken, the first that is refused by name."""

from collections.abc import Callable
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
from slipstream.training import config

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
