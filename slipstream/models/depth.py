"""Attention residuals between a model's layers: what goes into one is mixed from all before it."""

import torch
from torch import Tensor, nn

from slipstream.ops.attnres import attnres


class AttentionResiduals(nn.Module):
    """Attention over depth: the input of each layer after the first, and of the last norm.

        v_0 is the embedding, v_1, v_2, ... what each `group` layers in a row have added
        h = sum_i p_i v_i,  p = softmax over i of query . rms_norm(v_i) * weight

    With queries of 0, as they begin, h is the mean of all v_i.

    Args:
        hidden_size: D. layers: of the model. group: how many layers add to one v_i.
        eps: inside the norm.

    Source: Kimi Team, "Attention Residuals" (arXiv 2603.15031), between whole layers: MLPs keep
    the residual connection to their layer's mixer.
    """

    def __init__(self, hidden_size: int, layers: int, group: int, eps: float) -> None:
        super().__init__()
        self.group, self.eps = group, eps
        self.query, self.weight = (nn.Parameter(torch.empty(layers, hidden_size)) for _ in "qw")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def forward(self, layer: int, sources: list[Tensor]) -> Tensor:
        """The input of a layer from 1 on, from all v_i so far, [B, T, D] each."""
        query, weight = self.query[layer - 1], self.weight[layer - 1]
        return attnres(query, sources, weight, rms_eps=self.eps)

    def with_added(self, layer: int, sources: list[Tensor], added: Tensor) -> list[Tensor]:
        """Returns all v_i after a layer has added to the last, or to a new one."""
        if layer % self.group == 0:
            return [*sources, added]
        return [*sources[:-1], sources[-1] + added]
