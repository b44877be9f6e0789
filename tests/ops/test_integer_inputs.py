"""Offsets, lengths, indices, pages and targets as views, whose kernels read them by pointers: a
column of a table, or every other number."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.tools.catalog import OPERATORS, Sample, Shape
from tests.support.interpreted import interpreted

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
