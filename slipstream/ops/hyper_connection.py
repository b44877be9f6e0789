"""Hyper-connections: a layer reads a mixture of N residual streams, and writes into all of them."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.hyper_connection import op


@checks.operator
def mhc_pre(
    streams: Tensor,
    weight: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    iterations: int = 20,
    magnitude: float = 2.0,
    post_eps: float = 0.0,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Before a layer: its input, and the weights by which its output goes into the streams.

        p = weight . rms_norm(streams)          of a token's N D features, M numbers
        pre = sigmoid(scale_0 p + base) + eps                       the first N of them
        post = magnitude sigmoid(scale_1 p + base) + post_eps       the next N
        comb = softmax(scale_2 p + base, -1) + eps                  the last N N
        comb <- comb / (comb.sum(-2) + eps), then iterations - 1 times rows and columns
        collapsed = sum_n pre_n streams_n

    Args:
        streams: [..., N, D], any floating dtype; so weight, base and scale.
        weight: [M, N D]. M is N for pre alone, as after the last layer, 2 N without comb,
            (2 + N) N for all. base: [M]. scale: [1], [2] or [3], one for each of the three.
        eps: added to pre, to comb and to what comb is divided by.
        norm_eps: of the norm, inside the root.
        iterations: of Sinkhorn and Knopp, 1 or more, which make rows and columns sum to 1.
        magnitude, post_eps: the range of post, and what is added to it.
        impl: None chooses; "triton" or "eager" is used or refused.

    Returns:
        collapsed [..., D] in streams' dtype, post [..., N] and comb [..., N, N] in float32
        (float64 if streams are), None where M has no weights of it.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: 2 M N D flops a token. Forward reads the streams twice and keeps M + 2 iterations N
        numbers a token; backward reads them three times. More than 8 streams run in plain torch.
    Source: Xie et al., mHC: Manifold-Constrained Hyper-Connections, 2026 (arXiv 2512.24880).
    """
    _expect(streams=streams, weight=weight, base=base, scale=scale)
    N, D = streams.shape[-2:]
    sizes = [N, 2 * N, (2 + N) * N]
    if weight.dim() != 2 or weight.shape[0] not in sizes or weight.shape[1] != N * D:
        want = f"[M, N D = {N * D}] with M = {', '.join(map(str, sizes))}"
        raise ValueError(f"weight: want {want}, got shape {tuple(weight.shape)}")
    checks.expect_shape("base", base, weight.shape[:1])
    checks.expect_shape("scale", scale, (sizes.index(weight.shape[0]) + 1,))
    for name, x in (("eps", eps), ("norm_eps", norm_eps), ("post_eps", post_eps)):
        checks.expect_not_negative(name, x)
    if iterations < 1:
        raise ValueError(f"iterations: want 1 or more, got {iterations}")
    numbers = float(eps), float(norm_eps), int(iterations), float(magnitude), float(post_eps)
    collapsed, post, comb = op.pre((streams, weight, base, scale), numbers, impl)
    return collapsed, post, comb


@checks.operator
def mhc_post(
    streams: Tensor, y: Tensor, post: Tensor, comb: Tensor | None = None, *, impl: str | None = None
) -> Tensor:
    """After a layer: its output goes into the streams.

        streams'_j = post_j y + sum_n comb[n, j] streams_n

    Args:
        streams: [..., N, D], y: [..., D], what the layer returns, post: [..., N], any floating
            dtypes.
        comb: [..., N, N], any floating dtype; None is the identity.
        impl: None chooses; "triton" or "eager" is used or refused.

    Returns:
        streams' [..., N, D] in streams' dtype, computed in float32 and rounded once.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: each way all tensors are read once. More than 8 streams run in plain torch.
    Source: as mhc_pre.
    """
    _expect(streams=streams, y=y, post=post, comb=comb)
    *batch, N, D = streams.shape
    for name, x, size in (("y", y, [D]), ("post", post, [N]), ("comb", comb, [N, N])):
        if x is not None:
            checks.expect_shape(name, x, (*batch, *size))
    return op.post((streams, y, post, comb), impl)


def _expect(**tensors: Tensor | None) -> None:
    streams = tensors["streams"]
    if streams is not None and streams.dim() < 2:
        raise ValueError(f"streams: want [..., N, D], got shape {tuple(streams.shape)}")
    checks.expect_floating(tensors)
    checks.expect_one_dtype({"streams": streams})
    checks.expect_one_device(tensors)
