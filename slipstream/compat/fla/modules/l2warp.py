"""fla.modules.l2warp: a penalty on the largest logit, in the gradient alone."""

from typing import Any

from torch import Tensor

from slipstream.runtime import autograd


class L2Wrap(autograd.Function):
    """loss as it is; the gradient of the largest logit of each token grows by a share of it."""

    operator = "fla.modules.l2warp.l2_warp"

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor, l2_penalty_factor: float = 1e-4) -> Tensor:
        largest, index = logits.max(dim=-1, keepdim=True)
        tokens = logits.shape[0] * logits.shape[1]
        autograd.save(ctx, largest * (l2_penalty_factor / tokens), index)
        ctx.shape = logits.shape
        return loss.view_as(loss)

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx: Any, saved: autograd.Saved, dloss: Tensor) -> Any:
        penalty, index = saved
        dlogits = penalty.new_zeros(ctx.shape)
        dlogits.scatter_(-1, index, (penalty * dloss).to(penalty.dtype))
        return dloss, dlogits, None


def l2_warp(loss: Tensor, logits: Tensor, l2_penalty_factor: float = 1e-4) -> Tensor:
    """Adds l2_penalty_factor max(logits) / (B T) to the gradient of each token's largest logit.

    Args:
        loss: a scalar, returned as it is. logits: [B, T, V].
    """
    autograd.refuse_transforms(L2Wrap.operator, (loss, logits))
    return L2Wrap.apply(loss, logits, l2_penalty_factor)
