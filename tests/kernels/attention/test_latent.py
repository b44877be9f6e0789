"""Attention to a cache of latents: plain torch against the reference, and Triton's kernel."""

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.latent import eager_latent_attention, latent_attention
from slipstream.kernels.attention.reference import softmax_reference
from tests.support.interpreted import interpreted

# B, T, S, H, page, width, rest
CALLS = [(2, 1, 70, 7, 0, 40, 8), (3, 3, 96, 3, 16, 64, 32), (2, 2, 90, 5, 30, 48, 16)]


def inputs(
    call: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    B, T, S, H, page, width, rest = call
    torch.manual_seed(0)
    q = torch.randn(B, T, H, width + rest, dtype=dtype)
    table = torch.randperm(B * S // page).int().view(B, -1) if page else None
    latent = torch.randn(*((B * S // page, page) if page else (B, S)), width + rest, dtype=dtype)
    return q, latent, torch.tensor([S, 1, 77][:B]), table


@pytest.mark.parametrize("call", CALLS)
def test_plain_latent_attention_matches_reference(call: tuple) -> None:
    q, latent, lengths, table = inputs(call, torch.float64)
    o, lse = eager_latent_attention(q, latent, lengths, table, call[5], 0.2)
    rows = latent if table is None else latent[table.long()].flatten(1, 2)
    k = rows[:, :, None]
    terms = AttentionInputs(q, k, k[..., : call[5]], lengths=lengths)
    right_o, right_lse = softmax_reference(terms, AttentionOptions(0.2, -1, 0))
    torch.testing.assert_close(o, right_o)
    torch.testing.assert_close(lse, right_lse)


def test_latent_attention_has_gradients_in_plain_torch() -> None:
    q, latent, lengths, _ = inputs((2, 2, 6, 2, 0, 5, 3), torch.float64)
    leaves = [q.requires_grad_(), latent.requires_grad_()]
    torch.autograd.gradcheck(
        lambda q, latent: latent_attention(q, latent, lengths.clamp(max=6), width=5, scale=0.3),
        leaves,
    )


@pytest.mark.parametrize("grad", [False, True])
def test_latent_attention_reads_no_missing_page(grad: bool) -> None:
    q, latent, lengths, table = inputs(CALLS[2], torch.float64)
    assert table is not None
    q.requires_grad_(grad)
    given = {"width": 48, "scale": 0.2}
    unused = table.clone()
    unused[1, 1:] = len(latent)  # sequence 1 has one key
    want = latent_attention(q, latent, lengths, table=table, **given)
    torch.testing.assert_close(
        latent_attention(q, latent, lengths, table=unused, **given), want, rtol=0, atol=0
    )
    missing = table.clone()
    missing[1] = -1
    latent[int(table[1, 0])] = torch.nan
    o = latent_attention(q, latent, lengths, table=missing, **given)
    torch.testing.assert_close(o[0], want[0], rtol=0, atol=0)
    assert not o[1].any()
    missing[0, 1] = len(latent)
    with pytest.raises(ValueError, match=r"table: want less than the 6 pages of latent, got 6"):
        latent_attention(q, latent, lengths, table=missing, **given)


@interpreted
def test_latent_kernel_interpreted() -> None:
    for call in CALLS:
        q, latent, lengths, table = inputs(call, torch.float32)
        given = {"width": call[5], "scale": 0.2, "table": table, "impl": "triton"}
        o = latent_attention(q, latent, lengths, **given)
        right, _ = eager_latent_attention(q, latent, lengths, table, call[5], 0.2)
        torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-5)
        if table is None:
            continue
        from slipstream.kernels.attention.triton import decode_latent

        table[0, 1], table[1] = -1, len(latent)
        o, _ = decode_latent.decode(q, latent, lengths, table, call[5], 0.2)
        right, _ = eager_latent_attention(q, latent, lengths, table, call[5], 0.2)
        torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-5)
        assert not o[1].any()
