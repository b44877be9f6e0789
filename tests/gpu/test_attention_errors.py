"""Attention's errors against float64 beside those of torch's own in the same precision.

Fresh random data, odd lengths, windows narrower and wider than a tile, sequences without queries or
keys, queries that see nothing: no result is off by more than one and a half times what torch's
scaled_dot_product_attention is off by, on the same numbers.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.reference import softmax_reference
from slipstream.ops.attention import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = 1.5
# B, T, S, H, HKV, left, right
CASES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "causal": (2, 777, 777, 4, 4, -1, 0),
    "full": (2, 333, 517, 4, 2, -1, -1),
    "narrow window": (1, 901, 901, 4, 2, 17, 0),
    "wide window": (1, 901, 1003, 2, 2, 300, 150),
    "blind rows": (1, 700, 300, 2, 1, -1, 0),
    "one key": (2, 129, 1, 2, 2, -1, -1),
}
WIDTHS = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 96), (100, 100), (192, 128), (64, 256),
          (128, 64)]  # fmt: skip


def torchs(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """torch's attention, by a mask where it wants one; a query that sees nothing gives 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    blind = ~seen.any(-1, keepdim=True)  # [1, T, 1]
    full = bool(seen.all())
    T, S = seen.shape[1:]
    causal = not full and T == S and torch.equal(seen, torch.ones_like(seen).tril())
    mask = None if full or causal else seen | blind
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return torch.where(blind, 0.0, o).transpose(1, 2)


def sight(T: int, S: int, left: int, right: int) -> Tensor:
    age = torch.arange(T, device="cuda")[:, None] + S - T - torch.arange(S, device="cuda")
    seen = torch.ones_like(age, dtype=torch.bool)
    if left >= 0:
        seen &= age <= left
    return seen & (age >= -right) if right >= 0 else seen


def error(got: Tensor, want: Tensor) -> float:
    off = (got.double() - want).square().mean().sqrt()
    return (off / want.square().mean().sqrt().clamp(min=1e-3)).item()


def with_gradients(run: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = run(*leaves)
    return dict(zip(("o", "dq", "dk", "dv"), (o, *torch.autograd.grad(o, leaves, do))))


def held_beside_torch(
    ours: dict[str, Tensor], torchs: dict[str, Tensor], want: dict[str, Tensor], label: str
) -> None:
    # a thirtieth of a rounding: where torch is exact, as with one key
    least = torch.finfo(ours["o"].dtype).eps / 78
    for name, right in want.items():
        assert ours[name].isfinite().all(), (label, name)
        mine, peers = error(ours[name], right), error(torchs[name], right)
        assert mine <= max(LIMIT * peers, least), f"{label} {name}: {mine:.2e}, torch {peers:.2e}"


def cases() -> Iterator[Any]:
    """All in bfloat16, and in float16 and float32 some of each."""
    for name in CASES:
        for D, DV in WIDTHS:
            for impl in ("sm90", "triton"):
                yield pytest.param(name, D, DV, impl, torch.bfloat16, id=f"{name}-{D}-{DV}-{impl}")
    for name in ("causal", "full", "narrow window", "blind rows"):
        for D, DV in ((64, 64), (128, 128), (256, 256), (192, 128), (100, 100)):
            for impl in ("sm90", "triton"):
                label = f"{name}-{D}-{DV}-{impl}-fp16"
                yield pytest.param(name, D, DV, impl, torch.float16, id=label)
    for name in ("causal", "narrow window", "blind rows"):
        for D, DV in ((64, 64), (128, 64), (100, 100)):
            yield pytest.param(name, D, DV, "triton", torch.float32, id=f"{name}-{D}-{DV}-fp32")


@pytest.mark.parametrize(("name", "D", "DV", "impl", "dtype"), list(cases()))
def test_errors_are_at_most_those_of_torch(
    name: str, D: int, DV: int, impl: str | None, dtype: torch.dtype
) -> None:
    B, T, S, H, HKV, left, right = CASES[name]
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    if impl == "sm90" and (D, DV) == (192, 128):
        impl = None  # which has the forward alone: by the plan
    q, do = torch.randn(B, T, H, D, **make), torch.randn(B, T, H, DV, **make)
    k, v = torch.randn(B, S, HKV, D, **make), torch.randn(B, S, HKV, DV, **make)
    scale, seen = D**-0.5, sight(T, S, left, right)[None]
    options: dict[str, Any] = {"window_size": (left, right), "causal": False, "impl": impl}
    try:
        ours = with_gradients(lambda *x: attention(*x, **options), q, k, v, do)
    except NotImplementedError as error:
        pytest.skip(str(error))
    peers = with_gradients(lambda q, k, v: torchs(q, k, v, seen, scale), q, k, v, do)
    want = with_gradients(
        lambda *x: softmax_reference(AttentionInputs(*x), AttentionOptions(scale, left, right))[0],
        q.double(), k.double(), v.double(), do.double(),
    )  # fmt: skip
    held_beside_torch(ours, peers, want, f"{name} {D}/{DV} {impl}")
    blind = ~seen[0].any(-1)
    _, lse = attention(q, k, v, **options, return_lse=True)
    assert not ours["o"][:, blind].any() and not ours["dq"][:, blind].any()
    assert torch.equal(lse == -torch.inf, blind.expand_as(lse))


@pytest.mark.parametrize("impl", ["sm90", "triton"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("window", [(-1, 0), (40, 0), (200, 90)])
def test_packed_errors_are_at_most_those_of_torch(
    D: int, impl: str, window: tuple[int, int]
) -> None:
    """Sequences without queries, without keys, and with neither among them."""
    q_lengths, k_lengths = (5, 0, 400, 1, 0, 294), (0, 7, 500, 1, 0, 192)
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    T, S, scale = sum(q_lengths), sum(k_lengths), D**-0.5
    q, k, v, do = (torch.randn(1, n, h, D, **make) for n, h in ((T, 4), (S, 2), (S, 2), (T, 4)))
    cu_q, cu_k = (
        torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (q_lengths, k_lengths)
    )
    rows = [sight(t, s, *window) for t, s in zip(q_lengths, k_lengths)]
    seen = torch.block_diag(*rows).bool()[None]
    ours = with_gradients(
        lambda *x: attention(
            *x, window_size=window, causal=False, cu_seqlens=cu_q, cu_seqlens_k=cu_k, impl=impl
        ),
        q, k, v, do,
    )  # fmt: skip
    peers = with_gradients(lambda q, k, v: torchs(q, k, v, seen, scale), q, k, v, do)
    terms: dict[str, Tensor] = {"cu_q": cu_q, "cu_k": cu_k}
    options = AttentionOptions(scale, *window)
    want = with_gradients(
        lambda *x: softmax_reference(AttentionInputs(*x, **terms), options)[0],
        q.double(), k.double(), v.double(), do.double(),
    )  # fmt: skip
    held_beside_torch(ours, peers, want, f"packed {D} {impl} {window}")
