"""The sm_90 kernel over a cache of latents, held against plain torch by numpy."""

import functools
from typing import Any

import pytest
import torch

from slipstream.kernels.attention.latent import eager_latent_attention
from tests.gluon_emulator.threads import Descriptor, Pointer, kernel, launch

_NAME = "slipstream.kernels.attention.sm90.decode_latent:softmax_latent_decode_sm90_kernel"
_LN2 = 0.6931471805599453


@functools.cache
def found() -> Any:
    return kernel(_NAME)


@pytest.mark.parametrize(
    ("page", "missing"), [(0, None), (64, None), (128, None), (64, -1), (128, 10**6)]
)
@pytest.mark.parametrize(("T", "H", "shares"), [(1, 7, 2), (3, 30, 1), (1, 128, 3)])
def test_latent_kernel_matches_plain_torch(
    T: int, H: int, shares: int, page: int, missing: int | None
) -> None:
    B, S = 3, 384
    q = torch.randn(B, T, H, 576, dtype=torch.float64)
    latent = torch.randn(B * S, 576, dtype=torch.float64)
    table = torch.randperm(B * S // page).int().view(B, -1) if page else None
    if table is not None and missing is not None:  # a page in use, and all of the only one's
        table[0, 1] = table[1] = missing
    cache = latent.view(-1, page or S, 576)
    lengths = torch.tensor([S, 1, 177], dtype=torch.int32)
    o, lse = eager_latent_attention(q, cache, lengths, table, 512, 0.05)
    parts = torch.full((shares, B, T, H, 512), torch.nan, dtype=torch.float64)
    lses = torch.full((shares, B, H, T), torch.nan, dtype=torch.float64)
    rows = q.view(-1, 576)
    tiles = -(-T * H // 64)
    descs = [Descriptor(x.numpy(), (64, w)) for x in (rows, latent) for w in (256, 64)]
    table_ptr = None if table is None else Pointer(table.numpy().reshape(-1))
    launch(
        found(), tiles * shares * B,
        (*descs, *(Pointer(x.numpy().reshape(-1)) for x in (parts, lses, lengths)), table_ptr,
         0.05 / _LN2, T, H, B, tiles, shares, S, S // (page or S), S),
        PAGE=page, HAS_LENGTHS=True,
    )  # fmt: skip
    lses *= _LN2
    whole = lses.logsumexp(0)
    torch.testing.assert_close(whole, lse, rtol=1e-9, atol=1e-9)
    weights = torch.where(whole.isfinite(), (lses - whole).exp(), 0.0)
    got = (parts * weights.transpose(2, 3)[..., None]).sum(0)
    torch.testing.assert_close(got, o, rtol=1e-9, atol=1e-9)
