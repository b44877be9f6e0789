"""fla's references in plain torch beside our operators, under fla's names and arguments. Wants
fla's files, as tests/compat/test_fla_interop.py does."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import slipstream.compat.fla.ops as ours

pytest.importorskip("einops")
try:
    FILES = Path(str(importlib.metadata.distribution("fla-core").locate_file("fla")))
except importlib.metadata.PackageNotFoundError:
    pytest.skip("fla's files are not there", allow_module_level=True)
pytestmark = pytest.mark.slow

B, T, H, K = 2, 64, 3, 16


@cache
def reference(name: str) -> ModuleType:
    """A file of fla in plain torch, outside of its package."""
    spec = importlib.util.spec_from_file_location(f"fla_reference_{id(name)}", FILES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Inputs:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.q, self.k, self.v = torch.randn(3, B, T, H, K)
        self.unit = normalize(self.k, dim=-1)
        self.gk, self.g = -torch.rand(B, T, H, K), -torch.rand(B, T, H)
        self.beta = torch.rand(B, T, H)
        self.a, self.b = -self.unit, self.unit * torch.rand(B, T, H, 1)
        self.s, self.gs = torch.randn(B, T, H, 8), -torch.rand(B, T, H, 8)
        self.u = torch.randn(H, K)
        self.h0 = torch.randn(B, H, K, K)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _product(x: Inputs) -> tuple[Any, Any]:
    k, v = (y.repeat_interleave(2, 1) for y in (x.unit, x.v))
    k, beta = normalize(k + torch.randn_like(k), dim=-1), torch.rand(B, 2 * T, H)
    theirs = reference("ops/gated_delta_product/naive").naive_recurrent_gated_delta_product
    return (
        ours.gated_delta_product.chunk_gated_delta_product(x.q, k, v, x.g, beta, 2),
        theirs(x.q, k, v, x.g, beta, K**-0.5, num_householder=2),
    )


def _attnres(x: Inputs) -> tuple[Any, Any]:
    query, weight, output = torch.randn(K), torch.rand(K), torch.rand(K)
    given = query, [x.q, x.k, x.v], weight, output
    theirs = reference("ops/attnres/naive").naive_attnres(*given, scale=0.3)
    return ours.fused_attnres(*given, scale=0.3), theirs


PAIRS: dict[str, Callable[[Inputs], tuple[Any, Any]]] = {
    "gla": lambda x: (
        ours.chunk_gla(x.q, x.k, x.v, x.gk),
        reference("ops/gla/naive").naive_recurrent_gla(x.q, x.k, x.v, x.gk),
    ),
    "gated_delta_rule": lambda x: (
        ours.chunk_gdn(x.q, x.unit, x.v, x.g, x.beta, None, x.h0),
        reference("ops/gated_delta_rule/naive").naive_recurrent_gated_delta_rule(
            x.q, x.unit, x.v, x.beta, x.g, initial_state=x.h0
        ),
    ),
    "kda": lambda x: (
        ours.chunk_kda(x.q, x.unit, x.v, x.gk, x.beta, None, x.h0),
        reference("ops/kda/naive").naive_recurrent_kda(
            x.q, x.unit, x.v, x.gk, x.beta, initial_state=x.h0
        ),
    ),
    # naive_recurrent_comba decays before it erases, unlike fla's kernels and the paper
    "comba": lambda x: (
        ours.fused_recurrent_comba(x.q, x.unit, x.b, x.v, x.g, x.beta),
        reference("ops/comba/naive").naive_chunk_comba(x.q, x.unit, x.v, x.b, x.g, x.beta),
    ),
    "gsa": lambda x: (
        ours.chunk_gsa(x.q, x.k, x.v, x.s, x.gs),
        reference("ops/gsa/naive").naive_recurrent_gsa(x.q, x.k, x.v, x.s, x.gs),
    ),
    "abc": lambda x: (
        ours.chunk_abc(x.q, x.k, x.v, x.s),
        reference("ops/abc/naive").naive_cumsum_abc(*heads_first(x.q, x.k, x.v, x.s)),
    ),
    "hgrn": lambda x: (
        ours.hgrn.chunk_hgrn(x.q.flatten(2), x.gk.flatten(2)),
        reference("ops/hgrn/naive").naive_recurrent_hgrn(x.q.flatten(2), x.gk.flatten(2)),
    ),
    "linear_attn": lambda x: (
        ours.chunk_linear_attn(x.q.abs(), x.k.abs(), x.v),
        reference("ops/linear_attn/naive").naive_recurrent_linear_attn(
            x.q.abs(), x.k.abs(), x.v, normalize=True
        ),
    ),
    "retention": lambda x: (
        ours.parallel_retention(x.q, x.k, x.v),
        reference("ops/retention/naive").naive_retention(*heads_first(x.q, x.k, x.v)),
    ),
    "rwkv6": lambda x: (
        ours.chunk_rwkv6(x.q, x.k, x.v, x.gk, x.u),
        reference("ops/rwkv6/recurrent_naive").naive_recurrent_rwkv6(
            *heads_first(x.q, x.k, x.v, x.gk), x.u
        ),
    ),
    "simple_gla": lambda x: (
        ours.parallel_simple_gla(x.q, x.k, x.v, x.g),
        reference("ops/simple_gla/naive").naive_recurrent_simple_gla(x.q, x.k, x.v, x.g),
    ),
    "delta_rule": lambda x: (
        ours.chunk_delta_rule(x.q, x.unit, x.v, x.beta),
        reference("ops/delta_rule/naive").delta_rule_recurrence(
            *heads_first(x.q, x.unit, x.v, x.beta)
        ),
    ),
    "dplr": lambda x: (
        ours.chunk_dplr_delta_rule(x.q, x.k, x.v, x.a, x.b, x.gk),
        reference("ops/generalized_delta_rule/dplr/naive").dplr_recurrence(
            *heads_first(x.q, x.k, x.v, x.a, x.b, x.gk)
        ),
    ),
    "gated_delta_product": _product,
    "attn": lambda x: (
        ours.parallel_attn(x.q, x.k, x.v, x.g, window_size=7),
        reference("ops/attn/naive").naive_parallel_attn(x.q, x.k, x.v, window_size=7, g=x.g),
    ),
    "forgetting_attn": lambda x: (
        ours.parallel_forgetting_attn(x.q, x.k, x.v, x.g),
        reference("ops/forgetting_attn/naive").naive_forgetting_attn(x.q, x.k, x.v, x.g),
    ),
    "attnres": _attnres,
}


@pytest.mark.parametrize("name", PAIRS)
def test_operator_equals_the_reference_of_fla(name: str) -> None:
    got, want = (y[0] if isinstance(y, tuple) else y for y in PAIRS[name](Inputs()))
    want = want if want.shape == got.shape else want.transpose(1, 2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
