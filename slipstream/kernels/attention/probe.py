"""Do the kernels and plain torch agree on a small fresh problem of the same kind as a call? Of
attention, of reading caches of keys or latents, and of writing them. For runtime/guarded_launch.py,
on compilers that are not verified."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.common import rounded_keys
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.runtime import kernel_pair
from slipstream.runtime.kernel_pair import TOKENS


def mismatch(
    inputs: AttentionInputs,
    options: AttentionOptions,
    impl: str,
    softmax: Callable,
    backward_impls: str,
) -> str | None:
    """The name of a result that differs, and by how much; None if none does.

    Args:
        softmax: takes terms, options, names of implementations, and those of the gradients.
    """
    near = options._replace(left=min(options.left, 70), right=min(options.right, 70))

    def run(*impls: str) -> Callable[[kernel_pair.Given], Any]:
        return lambda args: softmax(AttentionInputs(**args), near, *impls)

    backward = backward_impls if backward_impls == "eager" else f"{backward_impls}|eager"
    kernels = run(f"{impl}|eager", backward)
    return kernel_pair.mismatch(kernels, run("eager"), like(inputs)._asdict())


def like(inputs: AttentionInputs) -> AttentionInputs:
    """Fresh terms of the same widths, dtypes and kind: one or two sequences, one head of k."""
    q, k, v = inputs[:3]
    device, dtype = q.device, q.dtype
    H = max(q.shape[2] // max(k.shape[2], 1), 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    fresh: dict[str, Any] = {
        "q": normal(1, TOKENS, H, q.shape[-1]).to(dtype),
        "k": normal(1, TOKENS, 1, k.shape[-1]).to(dtype),
        "v": normal(1, TOKENS, 1, v.shape[-1]).to(dtype),
    }
    if inputs.g is not None:
        fresh["g"] = (-0.1 * normal(1, TOKENS, H).abs()).to(inputs.g.dtype)
    if inputs.sinks is not None:
        fresh["sinks"] = normal(H).to(inputs.sinks.dtype)
    if inputs.slopes is not None:
        fresh["slopes"] = (0.1 * normal(H).abs()).to(inputs.slopes.dtype)
    cuts = torch.tensor([0, TOKENS // 3, TOKENS], device=device)
    for name in ("cu_q", "cu_k"):
        if (args := getattr(inputs, name)) is not None:
            fresh[name] = cuts.to(args.dtype)
    if inputs.seed is not None:
        fresh["seed"] = torch.full_like(inputs.seed, 7)
    if inputs.lengths is not None:
        sequences = 2 if inputs.cu_q is not None else 1
        fresh["lengths"] = torch.full(
            (sequences,), TOKENS // 4, device=device, dtype=inputs.lengths.dtype
        )
        if inputs.cu_q is not None and inputs.cu_k is None:
            # keys and their gates lie a sequence a row
            rows = {x: fresh[x] for x in ("k", "v", "g") if x in fresh}
            fresh |= {name: torch.cat([x, x]) for name, x in rows.items()}
    return AttentionInputs(**fresh)


def mismatch_of_cache(call: Cache, options: AttentionOptions, decode: Callable) -> str | None:
    """The difference between readings of a small cache, in pages if the call's is."""
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
    probe_inputs = Cache(
        normal(2, 1, H, q.shape[-1]),
        normal(2 * pages, page, 1, k.shape[-1]),
        normal(2 * pages, page, 1, v.shape[-1]),
        lengths=torch.tensor([17, 40], device=q.device, dtype=torch.int32),
        table=table,
    )

    if call.k_scale is not None:
        k, k_scale = rounded_keys.encode(probe_inputs.k, k.dtype)
        v, v_scale = rounded_keys.encode(probe_inputs.v, v.dtype)
        probe_inputs = probe_inputs._replace(k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def run(impl: str) -> Callable[[kernel_pair.Given], Any]:
        return lambda args: decode(*Cache(**args), *options, impl)

    return kernel_pair.mismatch(
        run("triton|eager"), run("eager"), probe_inputs._asdict(), gradients=False
    )


def mismatch_of_latents(
    like: tuple[Any, ...], kernels: Callable[..., Any], plain: Callable[..., Any]
) -> str | None:
    """The name of a result that differs, and by how much; None if none does.

    Args:
        like: q, latent, lengths, table, width and scale of the call.
        kernels, plain: take these, and give o and lse.
    """
    q, latent, _, table, width, scale = like
    page = 40 if table is None else latent.shape[1]
    pages = -(-40 // page)
    rows, order = _pages(q.device, table, pages)
    probe_inputs = {
        "q": kernel_pair.random_like(q, 2, min(q.shape[1], 2), min(q.shape[2], 16), q.shape[3]),
        "latent": kernel_pair.random_like(latent, rows, page, latent.shape[2]),
    }
    lengths = torch.tensor([17, 40], device=q.device, dtype=torch.int32)

    def run(run: Callable[..., Any]) -> Callable[[kernel_pair.Given], Any]:
        return lambda args: run(args["q"], args["latent"], lengths, order, width, scale)

    return kernel_pair.mismatch(run(kernels), run(plain), probe_inputs, gradients=False)


def mismatch_of_append(
    like: tuple[Any, ...], kernels: Callable[..., Any], plain: Callable[..., Any]
) -> str | None:
    """The difference between two caches after writing three keys into each, or None.

    Args:
        like: k_cache, v_cache, k, v, lengths, rows and table of the call.
        kernels, plain: take these and write into the first two.
    """
    k_cache, v_cache, k, v, _, _, table = like
    if not {k_cache.dtype, v_cache.dtype} <= {*kernel_pair.BARS}:
        return None
    page = 40 if table is None else k_cache.shape[1]
    pages = -(-40 // page)
    count, order = _pages(k.device, table, pages)
    probe_inputs = {
        "k_cache": kernel_pair.random_like(k_cache, count, page, *k_cache.shape[2:]),
        "v_cache": kernel_pair.random_like(v_cache, count, page, *v_cache.shape[2:]),
        "k": kernel_pair.random_like(k, 2, 3, *k.shape[2:]),
        "v": kernel_pair.random_like(v, 2, 3, *v.shape[2:]),
    }
    lengths = torch.tensor([5, 17], device=k.device, dtype=torch.int32)

    def run(run: Callable[..., Any]) -> Callable[[kernel_pair.Given], Any]:
        def written(args: kernel_pair.Given) -> tuple[Any, Any]:
            caches = args["k_cache"], args["v_cache"]
            run(*caches, args["k"], args["v"], lengths, None, order)
            return caches

        return written

    return kernel_pair.mismatch(run(kernels), run(plain), probe_inputs, gradients=False)


def _pages(device: torch.device, table: Tensor | None, pages: int) -> tuple[int, Tensor | None]:
    """How many rows or pages two sequences have, and a table of them if the call has one."""
    if table is None:
        return 2, None
    order = torch.randperm(2 * pages, device=device).view(2, pages)
    return 2 * pages, order.to(table.dtype)
