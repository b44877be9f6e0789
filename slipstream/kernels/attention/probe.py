"""Do the attention kernels and plain torch agree on a small fresh problem of the same kind as a
call? For runtime/guarded_launch.py, on compilers that nobody has verified."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.runtime import numeric_probe

TOKENS = 150


def mismatch(
    terms: AttentionInputs,
    options: AttentionOptions,
    impl: str,
    softmax: Callable,
    of_gradients: str,
) -> str | None:
    """What differs, or None.

    Args:
        softmax: takes terms, options, names of implementations, and those of the gradients.
    """
    near = options._replace(left=min(options.left, 70), right=min(options.right, 70))

    def run(*impls: str) -> Callable[[numeric_probe.Given], Any]:
        return lambda given: softmax(AttentionInputs(**given), near, *impls)

    backward = of_gradients if of_gradients == "eager" else f"{of_gradients}|eager"
    kernels = run(f"{impl}|eager", backward)
    return numeric_probe.mismatch(kernels, run("eager"), like(terms)._asdict())


def like(terms: AttentionInputs) -> AttentionInputs:
    """Fresh terms of the same widths, dtypes and kind: one or two sequences, one head of k."""
    q, k, v = terms[:3]
    device, dtype = q.device, q.dtype
    H = max(q.shape[2] // max(k.shape[2], 1), 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    found: dict[str, Any] = {
        "q": normal(1, TOKENS, H, q.shape[-1]).to(dtype),
        "k": normal(1, TOKENS, 1, k.shape[-1]).to(dtype),
        "v": normal(1, TOKENS, 1, v.shape[-1]).to(dtype),
    }
    if terms.g is not None:
        found["g"] = (-0.1 * normal(1, TOKENS, H).abs()).to(terms.g.dtype)
    if terms.sinks is not None:
        found["sinks"] = normal(H).to(terms.sinks.dtype)
    if terms.slopes is not None:
        found["slopes"] = (0.1 * normal(H).abs()).to(terms.slopes.dtype)
    cuts = torch.tensor([0, TOKENS // 3, TOKENS], device=device)
    for name in ("cu_q", "cu_k"):
        if (given := getattr(terms, name)) is not None:
            found[name] = cuts.to(given.dtype)
    if terms.seed is not None:
        found["seed"] = torch.full_like(terms.seed, 7)
    if terms.lengths is not None:
        sequences = 2 if terms.cu_q is not None else 1
        found["lengths"] = torch.full(
            (sequences,), TOKENS // 4, device=device, dtype=terms.lengths.dtype
        )
        if terms.cu_q is not None and terms.cu_k is None:
            found["k"], found["v"] = (found[x].repeat(2, 1, 1, 1) for x in "kv")
    return AttentionInputs(**found)


def mismatch_of_cache(call: Cache, options: AttentionOptions, decode: Callable) -> str | None:
    """What differs between readings of a small cache, in pages if the call's is."""
    q, k, v = call[:3]
    H = max(q.shape[2] // max(k.shape[2], 1), 1)
    page = k.shape[1] if call.table is not None else 40
    pages = 1 if call.table is None else -(-40 // page)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=q.device).to(q.dtype)

    table = None
    if call.table is not None:
        order = torch.randperm(2 * pages, device=q.device).view(2, pages)
        table = order.to(call.table.dtype)
    made = Cache(
        normal(2, 1, H, q.shape[-1]),
        normal(2 * pages, page, 1, k.shape[-1]),
        normal(2 * pages, page, 1, v.shape[-1]),
        lengths=torch.tensor([17, 40], device=q.device, dtype=torch.int32),
        table=table,
    )

    def run(impl: str) -> Callable[[numeric_probe.Given], Any]:
        return lambda given: decode(*Cache(**given), *options, impl)

    return numeric_probe.mismatch(
        run("triton|eager"), run("eager"), made._asdict(), gradients=False
    )
