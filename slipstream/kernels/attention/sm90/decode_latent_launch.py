"""The launch over a cache of latents for sm_90, where TMA can read it."""

from torch import Tensor

from slipstream.kernels.attention.sm90.decode_latent import softmax_latent_decode_sm90_kernel
from slipstream.kernels.attention.sm90.launch import _layout
from slipstream.kernels.primitives.gluon_compat import TensorDescriptor
from slipstream.runtime.launch_cache import cached

# as decode_latent.py has them
WIDTH, ROPE_DIM, BM, BN = 512, 64, 64, 64


def is_supported(q: Tensor, latent: Tensor, width: int, table: Tensor | None) -> bool:
    """Whether the kernel takes a call: the widths, pages of whole tiles, strides for TMA."""
    size, row = latent.shape[1], latent.stride(1)
    return (
        width == WIDTH
        and q.shape[-1] == WIDTH + ROPE_DIM
        and q.is_contiguous()
        and latent.stride(2) == 1
        and row >= WIDTH + ROPE_DIM
        and row % 8 == 0
        and latent.stride(0) % row == 0
        and (q.data_ptr() | latent.data_ptr()) % 16 == 0
        and (table is None or (size % BN == 0 and latent.stride(0) == size * row))
    )


def launch(
    q: Tensor,
    latent: Tensor,
    lengths: Tensor | None,
    table: Tensor | None,
    factor: float,
    partial_o: Tensor,
    partial_lse: Tensor,
    splits: int,
    tiles: int,
    capacity: int,
) -> None:
    """Writes o and lse of each share."""
    B, T, H, D = q.shape
    row = latent.stride(1)
    rows_b = latent.stride(0) // row
    shape = [(latent.shape[0] - 1) * rows_b + latent.shape[1], D]
    descs = {
        f"desc_{name}{suffix}": TensorDescriptor(
            x, size, [stride, 1], [64, width], _layout(64, width, q.dtype)
        )
        for name, x, size, stride in (("q", q, [B * T * H, D], D), ("k", latent, shape, row))
        for suffix, width in (("", WIDTH // 2), ("r", ROPE_DIM))
    }
    cached(softmax_latent_decode_sm90_kernel)[(tiles * splits * B,)](
        **descs,
        o_ptr=partial_o,
        lse_ptr=partial_lse,
        lengths_ptr=lengths,
        table_ptr=table,
        factor=factor,
        T=T,
        H=H,
        B=B,
        tiles=tiles,
        splits=splits,
        capacity=capacity,
        stride_table=0 if table is None else table.stride(0),
        rows_b=rows_b,
        PAGE=0 if table is None else latent.shape[1],
        HAS_LENGTHS=lengths is not None,
        num_warps=4,
        maxnreg=168,
    )
