"""attention with every feature: reference, joined halves, what it refuses, torch.compile."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.ops.attention import attention

CU, CU_K = torch.tensor([0, 5, 5, 20], dtype=torch.int32), torch.tensor([0, 9, 12, 26])


def inputs(S: int = 20) -> tuple[Tensor, ...]:
    return torch.randn(1, 20, 4, 8), torch.randn(1, S, 2, 8), torch.randn(1, S, 2, 6)


def test_attention_compiles_for_every_length() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for T, S in ((20, 20), (13, 13), (1, 20), (1, 1), (4, 20)):
        q, k, _ = inputs(S)  # heads of one width, as torch's own attention takes them
        got, want = compiled(q[:, -T:], k, k + 1), attention(q[:, -T:], k, k + 1)
        torch.testing.assert_close(got, want)


def test_attention_lse_joins_two_halves() -> None:
    q, k, v = inputs()
    o, lse = attention(q, k, v, causal=False, return_lse=True)
    halves = [
        attention(q, k[:, part], v[:, part], causal=False, return_lse=True)
        for part in (slice(0, 7), slice(7, 20))
    ]
    weights = torch.stack([x for _, x in halves]).softmax(0).transpose(2, 3)[..., None]
    joined = sum(w * x for w, (x, _) in zip(weights, halves))
    torch.testing.assert_close(joined, o)
    torch.testing.assert_close(torch.stack([x for _, x in halves]).logsumexp(0), lse)


def test_attention_gate_is_a_product() -> None:
    """One key far back, all scores 0: its weight is exp of the gates after it."""
    q, k = torch.zeros(1, 6, 1, 4), torch.zeros(1, 6, 1, 4)
    v = torch.eye(6)[None, :, None]
    g = torch.tensor([-9.0, -1.0, 0.0, -2.0, -torch.inf, -0.5]).view(1, 6, 1)
    p = attention(q, k, v, g=g)[0, :, 0]
    torch.testing.assert_close(p[3, 0] / p[3, 3], torch.tensor(-3.0).exp())
    torch.testing.assert_close(p[5], torch.tensor([0, 0, 0, 0, -0.5, 0.0]).exp().mul(
        torch.tensor([0, 0, 0, 0, 1.0, 1.0])) / (1 + torch.tensor(-0.5).exp()))  # fmt: skip


def test_attention_of_no_keys() -> None:
    q, k, v = (x.requires_grad_() for x in (*inputs(3)[:2], torch.randn(1, 3, 2, 6)))
    o, lse = attention(q, k, v, return_lse=True)
    assert torch.equal(lse[..., :17], torch.full((1, 4, 17), -torch.inf))
    assert not o[:, :17].any()
    grads = torch.autograd.grad(o.sum() + lse[..., 17:].sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][:, :17].any()


@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize(("B", "S"), [(0, 5), (2, 0)])
def test_attention_of_nothing_takes_slopes(B: int, S: int, consistent: bool) -> None:
    q, k = torch.randn(B, 3, 4, 8), torch.randn(B, S, 2, 8)
    options: dict[str, Any] = {"alibi_slopes": torch.rand(B, 4), "return_lse": True}
    found = attention(q, k, k, **options, consistent=consistent)
    torch.testing.assert_close(found, attention(q, k, k, **options, impl="reference"))


def test_attention_features_reject_faults_by_name() -> None:
    q, k, v = inputs()
    for options, error, word in [
        ({"g": torch.zeros(1, 20, 2)}, ValueError, "g: want shape"),
        ({"g": torch.zeros(1, 20, 4), "causal": False}, ValueError, "g: want causal"),
        ({"sinks": torch.zeros(2)}, ValueError, "sinks: want shape"),
        ({"alibi_slopes": torch.zeros(2, 4)}, ValueError, "alibi_slopes: want shape"),
        ({"cu_seqlens_k": CU_K}, ValueError, "cu_seqlens_k: wants"),
        ({"cu_seqlens": CU, "cu_seqlens_k": CU_K}, ValueError, "cu_seqlens_k: want offsets"),
        ({"impl": "triton"}, NotImplementedError, "impl='triton'"),
        ({"impl": "fast"}, ValueError, "impl: want None"),
    ]:
        with pytest.raises(error, match=word):
            attention(q, k, v, **options)
