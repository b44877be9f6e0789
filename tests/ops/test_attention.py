"""Softmax attention: packed equals separate, caches, windows, dropout, every feature, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.ops.attention import attention


def qkv(B: int = 1, T: int = 20, S: int | None = None) -> tuple[torch.Tensor, ...]:
    S = T if S is None else S
    return torch.randn(B, T, 4, 8), torch.randn(B, S, 2, 8), torch.randn(B, S, 2, 8)


def test_attention_window_of_one_is_the_value_itself() -> None:
    q, k, v = qkv()
    for given in ({}, {"cu_seqlens": torch.tensor([0, 12, 20])}):
        got = attention(q, k, v, window_size=1, **given)
        torch.testing.assert_close(got, v.repeat_interleave(2, dim=2))
    torch.testing.assert_close(attention(q, k, v, window_size=(-1, -1)), attention(q, k, v))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_window_of_zero_sees_nothing(packed: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 5, 5))
    offsets = torch.tensor([0, 2, 5]) if packed else None
    sinks = torch.randn(4, requires_grad=True)
    o, lse = attention(q, k, v, window_size=0, cu_seqlens=offsets, return_lse=True)
    assert torch.equal(o, torch.zeros(1, 5, 4, 8))
    assert torch.equal(lse, torch.full((1, 4, 5), -torch.inf))
    given = {"cu_seqlens": offsets, "sinks": sinks, "return_lse": True}
    o, lse = attention(q, k, v, window_size=0, **given)
    assert torch.equal(lse, sinks[:, None].expand(1, 4, 5))
    *rest, dsinks = torch.autograd.grad(o.sum() + lse.sum(), [q, k, v, sinks])
    assert not any(x.any() for x in rest)
    assert torch.equal(dsinks, torch.full((4,), 5.0))


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": 3, "causal": False, "softcap": 2.0},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 7])},
    "sinks": {"sinks": torch.tensor([0.3, -0.2], dtype=torch.float64)},
}


def inputs(tokens: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, tokens, 2, 3, dtype=dtype, requires_grad=True) for _ in range(3)]


def dropped(seed: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    o = attention(q, k, v, **options)
    assert isinstance(o, Tensor)
    return o


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_same_mask(name: str) -> None:
    assert torch.autograd.gradcheck(
        lambda *x: dropped(3, *x, dropout_p=0.4, **OPTIONS[name]), inputs(), fast_mode=True
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_mean_over_seeds_is_attention_without_dropout(name: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    want = attention(q, k, v, **OPTIONS[name])
    draws = torch.stack([dropped(i, q, k, v, dropout_p=0.3, **OPTIONS[name]) for i in range(100)])
    error = (draws.mean(0) - want).abs()
    # 6 standard errors; the first query of a sequence has one weight, 0 or 1 / 0.7
    assert bool((error <= 6 * draws.std(0) / 100**0.5 + 1e-9).all())


def test_weights_are_dropped_at_the_rate_asked_for() -> None:
    """With v = 1, an output is the sum of the weights that are not dropped."""
    q = k = torch.zeros(2, 300, 2, 4)
    v = torch.eye(300)[None, :, None].expand(2, -1, 2, -1)
    p = dropped(0, q, k, v, dropout_p=0.25, causal=False)
    assert abs(float((p == 0).float().mean()) - 0.25) < 0.005
    torch.testing.assert_close(p[p != 0], torch.full_like(p[p != 0], 1 / 300 / 0.75))
    assert not torch.equal(p[0], p[1]) and not torch.equal(p[:, :128], p[:, 128:256])


def test_dropout_follows_the_seed() -> None:
    q, k, v = inputs(200)
    first = dropped(1, q, k, v, dropout_p=0.5)
    second = attention(q, k, v, dropout_p=0.5)
    assert torch.equal(first, dropped(1, q, k, v, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_dropout_is_refused_where_it_cannot_be() -> None:
    q, k, v = inputs()
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="dropout_p: want a probability"):
            attention(q, k, v, dropout_p=p)
    with pytest.raises(TypeError, match="dropout_p: want a number"):
        attention(q, k, v, dropout_p="0.1")  # pyright: ignore
    with pytest.raises(NotImplementedError, match="dropout"):
        attention(q, k, v, dropout_p=0.1, impl="reference")


CU, CU_K = torch.tensor([0, 5, 5, 20], dtype=torch.int32), torch.tensor([0, 9, 12, 26])


def inputs_features(S: int = 20) -> tuple[Tensor, ...]:
    return torch.randn(1, 20, 4, 8), torch.randn(1, S, 2, 8), torch.randn(1, S, 2, 6)


def test_attention_compiles_for_every_length() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for T, S in ((20, 20), (13, 13), (1, 20), (1, 1), (4, 20)):
        q, k, _ = inputs_features(S)  # heads of one width, as torch's own attention takes them
        got, want = compiled(q[:, -T:], k, k + 1), attention(q[:, -T:], k, k + 1)
        torch.testing.assert_close(got, want)


def test_attention_lse_joins_two_halves() -> None:
    q, k, v = inputs_features()
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
    q, k, v = (x.requires_grad_() for x in (*inputs_features(3)[:2], torch.randn(1, 3, 2, 6)))
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
    q, k, v = inputs_features()
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
