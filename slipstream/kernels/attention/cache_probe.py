"""Do the kernels that read latents and write caches agree with plain torch on small fresh ones?

For runtime/guarded_launch.py, on compilers that are not verified; of what reads keys and values,
probe.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slipstream.runtime import numeric_probe


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
        "q": numeric_probe.random_like(q, 2, min(q.shape[1], 2), min(q.shape[2], 16), q.shape[3]),
        "latent": numeric_probe.random_like(latent, rows, page, latent.shape[2]),
    }
    lengths = torch.tensor([17, 40], device=q.device, dtype=torch.int32)

    def run(run: Callable[..., Any]) -> Callable[[numeric_probe.Given], Any]:
        return lambda args: run(args["q"], args["latent"], lengths, order, width, scale)

    return numeric_probe.mismatch(run(kernels), run(plain), probe_inputs, gradients=False)


def mismatch_of_append(
    like: tuple[Any, ...], kernels: Callable[..., Any], plain: Callable[..., Any]
) -> str | None:
    """The difference between two caches after writing three keys into each, or None.

    Args:
        like: k_cache, v_cache, k, v, lengths, rows and table of the call.
        kernels, plain: take these and write into the first two.
    """
    k_cache, v_cache, k, v, _, _, table = like
    if not {k_cache.dtype, v_cache.dtype} <= {*numeric_probe.BARS}:
        return None
    page = 40 if table is None else k_cache.shape[1]
    pages = -(-40 // page)
    count, order = _pages(k.device, table, pages)
    probe_inputs = {
        "k_cache": numeric_probe.random_like(k_cache, count, page, *k_cache.shape[2:]),
        "v_cache": numeric_probe.random_like(v_cache, count, page, *v_cache.shape[2:]),
        "k": numeric_probe.random_like(k, 2, 3, *k.shape[2:]),
        "v": numeric_probe.random_like(v, 2, 3, *v.shape[2:]),
    }
    lengths = torch.tensor([5, 17], device=k.device, dtype=torch.int32)

    def run(run: Callable[..., Any]) -> Callable[[numeric_probe.Given], Any]:
        def written(args: numeric_probe.Given) -> tuple[Any, Any]:
            caches = args["k_cache"], args["v_cache"]
            run(*caches, args["k"], args["v"], lengths, None, order)
            return caches

        return written

    return numeric_probe.mismatch(run(kernels), run(plain), probe_inputs, gradients=False)


def _pages(device: torch.device, table: Tensor | None, pages: int) -> tuple[int, Tensor | None]:
    """How many rows or pages two sequences have, and a table of them if the call has one."""
    if table is None:
        return 2, None
    order = torch.randperm(2 * pages, device=device).view(2, pages)
    return 2 * pages, order.to(table.dtype)
