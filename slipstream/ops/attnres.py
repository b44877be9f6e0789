"""Attention residuals: a layer's input is a softmax over what the layers before it left."""

from typing import Literal, overload

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.attnres import op
from slipstream.kernels.attnres.inputs import AttnresInputs


@overload
def attnres(
    query: Tensor,
    residuals: list | tuple | Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: Literal[False] = False,
    impl: str | None = None,
) -> Tensor: ...


@overload
def attnres(
    query: Tensor,
    residuals: list | tuple | Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: Literal[True],
    impl: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@checks.operator
def attnres(
    query: Tensor,
    residuals: list | tuple | Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the depth: a weighted sum of the L residuals of each token.

        p = softmax over l of scale * query . rms_norm(r_l) * rms_weight
        o = sum_l p_l r_l, or rms_norm(o) * output_rms_weight

    Args:
        query: [D], a layer's own, any floating dtype.
        residuals: a list or tuple of L tensors [..., D] of one shape and dtype, or one tensor
            [L, ..., D].
        rms_weight: [D], of the norm of the residuals that scores see.
        output_rms_weight: [D], of a norm of the sum, which the layer would begin with; None is
            no norm.
        rms_eps: of both norms.
        scale: factor on the scores.
        return_weights: return p too.
        impl: None chooses; "sm90", "triton" or "eager" is used or refused.

    Returns:
        o [..., D] in the residuals' dtype; with return_weights also p [L, ...], float32, without
        gradients. Without output_rms_weight backward may read o: autograd then refuses to go back
        after it was changed in place.

    Raises:
        ValueError, TypeError: an argument does not fit the others; the message names it.

    Cost: 5 L D flops a token. Forward reads the residuals once and writes o. Backward reads them
    once, and writes their gradients. With gradients forward also saves the sum before its norm and,
    in 16 bits, what rounding took from that sum. On sm_90 in 16 bits it saves neither where the
    backward keeps a token's residuals in shared memory, if they fit. More than 16 residuals or
    8192 features run in plain torch, in float32.
    Source: Kimi Team, "Attention Residuals" (arXiv 2603.15031).
    """
    if isinstance(residuals, Tensor):
        if residuals.dim() < 2:
            raise ValueError(f"residuals: want [L, ..., D], got shape {tuple(residuals.shape)}")
        parts = list(residuals.unbind(0))
    else:
        parts = list(residuals)
    if not parts:
        raise ValueError("residuals: want at least one tensor, got none")
    if not all(isinstance(x, Tensor) for x in parts):
        raise TypeError(
            f"residuals: want a torch.Tensor or a list of them, got {type(residuals).__name__}"
        )
    shape = parts[0].shape
    if len(shape) == 0:
        raise ValueError("residuals: want tensors [..., D], got one without dimensions")
    for i, x in enumerate(parts):
        checks.expect_shape(f"residuals[{i}]", x, tuple(shape))
    D = shape[-1]
    checks.expect_shape("query", query, (D,))
    checks.expect_shape("rms_weight", rms_weight, (D,))
    if output_rms_weight is not None:
        checks.expect_shape("output_rms_weight", output_rms_weight, (D,))
    given = {f"residuals[{i}]": x for i, x in enumerate(parts)}
    checks.expect_floating(given)
    checks.expect_one_dtype(given)
    given |= {"query": query, "rms_weight": rms_weight, "output_rms_weight": output_rms_weight}
    checks.expect_floating(given)
    checks.expect_one_device(given)
    weights = rms_weight, output_rms_weight
    y, p = op.attnres(AttnresInputs(query, parts, *weights, float(rms_eps), float(scale)), impl)
    return (y, p) if return_weights else y
