"""Attention's dropout by the Triton kernels under the interpreter: the weights that plain torch
keeps, and torch's gradients for them."""

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention import dropout
from slipstream.ops.attention import attention
from tests.support.interpreted import interpreted
from tests.support.operators import with_grads

# of q, k and v: batch, tokens, keys, heads, heads of keys, widths; and what is given beside them
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((2, 70, 70, 4, 2, 16, 16), {}),
    "window": (
        (1, 150, 190, 2, 2, 8, 24),
        {"window_size": (20, 3), "causal": False, "softcap": 2.0},
    ),
    "packed": ((1, 90, 90, 2, 1, 16, 16), {"cu_seqlens": torch.tensor([0, 33, 33, 90])}),
    "lengths": (
        (2, 5, 40, 2, 2, 16, 16),
        {"key_lengths": torch.tensor([9, 40]), "sinks": torch.tensor([0.3, -0.2])},
    ),
    "gate": ((1, 40, 40, 2, 1, 16, 16), {"g": -torch.rand(1, 40, 2)}),
}  # fmt: skip


def inputs(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    B, T, S, H, HKV, D, DV = sizes
    shapes = {"q": (B, T, H, D), "k": (B, S, HKV, D), "v": (B, S, HKV, DV)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def check(name: str) -> None:
    """Outputs and gradients are those of plain torch from the same seed, and again the same."""
    sizes, options = CALLS[name]
    args = inputs(sizes) | {n: x for n, x in options.items() if n in ("g", "sinks")}
    rest = {n: x for n, x in options.items() if n not in args}

    def by(impl: str) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(11)
        return with_grads(
            lambda args: list(attention(**args, **rest, dropout_p=0.4, impl=impl, return_lse=True)),
            args,
        )

    found, wanted, again = by("triton"), by("eager"), by("triton")
    for got, want, same in zip(map(tuple, found), map(tuple, wanted), map(tuple, again)):
        for x, y, z in zip(got, want, same, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5, msg=lambda m: f"{name}: {m}")
            assert torch.equal(x, z)


def weights(impl: str, p: float, T: int = 64) -> Tensor:
    """[heads, T, T]: with v = 1, an output is its weights."""
    q = torch.zeros(1, T, 2, 16)
    v = torch.eye(T)[None, :, None].expand(1, T, 2, T)
    torch.manual_seed(5)
    o = attention(q, q, v, dropout_p=p, causal=False, impl=impl)
    assert isinstance(o, Tensor)
    return o[0].transpose(0, 1)


def check_weights() -> None:
    for p in (0.25, 0.9):
        got, want = weights("triton", p), weights("eager", p)
        assert torch.equal(got == 0, want == 0)
        torch.testing.assert_close(got, want)
    assert not weights("triton", 1.0).any()


def test_words_are_philox() -> None:
    """Salmon et al.'s test vectors of Philox4x32-7: counter 0 and key 0, and all bits set."""
    zero, ones = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    want = {0: "5f6fb709 0d893f64 4f121f81 4f730a48", -1: "5207ddc2 45165e59 4d8ee751 8c52f662"}
    for seed, x in ((0, zero), (-1, ones)):
        words = dropout.philox(torch.tensor([seed]), x, x, x, x)
        assert " ".join(f"{int(word):08x}" for word in words) == want[seed]


@interpreted
def test_kernels_drop_what_plain_torch_drops() -> None:
    check_weights()
    for each in CALLS:
        check(each)
