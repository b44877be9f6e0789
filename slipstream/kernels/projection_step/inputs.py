"""The inputs of a step's linear layers."""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.kernels.primitives.norm_options import NormOptions

# of one launch, an argument of the kernel each
MAX_WEIGHTS = 5
# rows up to which the weights are the left operand; of more, and up to 64, x is, by wgmma
MMA_ROWS = 32
# and of how many columns of y at least
WGMMA_COLUMNS = 2048


class ProjectionInputs(NamedTuple):
    """x: [M, K]. weights: each [N_i, K]; biases: each [N_i] or None. norm_weight: [K].
    residual: [M, N]. norm: of x, an rms norm of rows, or None. glu: silu(y_0) y_1 of two weights.
    consistent: a row's bits are the same whatever rows are beside it.
    normed: the norm has been made already, as it is of several rows: it says what one row wants."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    norm_weight: Tensor | None
    residual: Tensor | None
    norm: NormOptions | None
    glu: bool
    consistent: bool
    normed: bool = False

    @property
    def normalises(self) -> bool:
        return self.norm is not None and not self.normed

    @property
    def is_long(self) -> bool:
        """Whether torch's products are faster: they share the long sums of several rows among
        programs."""
        M, K = self.x.shape
        return M > 1 and 2 * self.size < K and self.residual is not None and not self.consistent

    @property
    def size(self) -> int:
        """N: columns of the result."""
        sizes = [w.shape[0] for w in self.weights]
        return sizes[0] if self.glu else sum(sizes)

    @property
    def out_dtype(self) -> torch.dtype:
        return self.weights[0].dtype if self.residual is None else self.residual.dtype

    @property
    def is_wide(self) -> bool:
        """Whether x is the left operand, on GPUs that have wgmma."""
        x, weight = self.x, self.weights[0]
        is_large = x.shape[0] > MMA_ROWS and self.size >= WGMMA_COLUMNS
        return is_large and x.element_size() == weight.element_size() == 2 and not self.consistent


class NormedInputs(NamedTuple):
    """x: [M, K]. weight: [N, K]; bias: [N] or None. residual: [M, N]. norm_weight: [N], of the norm
    of their sum."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor
    norm_weight: Tensor

    @property
    def product(self) -> ProjectionInputs:
        """The product with nothing behind it."""
        weights, biases = [self.weight], [self.bias]
        return ProjectionInputs(self.x, weights, biases, None, None, None, False, False)
