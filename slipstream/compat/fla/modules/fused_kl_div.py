"""fla.modules.fused_kl_div: KL divergence from a teacher, behind two linear layers."""

from torch import Tensor, nn

from slipstream.ops.loss import linear_kl_div


def fused_kl_div_loss(
    x: Tensor,
    target_x: Tensor,
    weight: Tensor,
    target_weight: Tensor,
    reduction: str = "batchmean",
    accumulate_grad_in_fp32: bool = True,
) -> Tensor:
    """Mean over the rows of KL(softmax(target_x target_weight^T) || softmax(x weight^T)).

    Args:
        x, target_x: [N, D] of student and teacher. weight, target_weight: [V, D].
        accumulate_grad_in_fp32: no effect.
    """
    if reduction != "batchmean":
        raise ValueError(f'reduction: want "batchmean", got {reduction!r}')
    return linear_kl_div(x, weight, target_x, target_weight)


class FusedKLDivLoss(nn.Module):
    """fused_kl_div_loss as a module."""

    def __init__(self, reduction: str = "batchmean", accumulate_grad_in_fp32: bool = True) -> None:
        super().__init__()
        self.reduction, self.accumulate_grad_in_fp32 = reduction, accumulate_grad_in_fp32

    def forward(self, x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor) -> Tensor:
        return fused_kl_div_loss(x, target_x, weight, target_weight, self.reduction)
