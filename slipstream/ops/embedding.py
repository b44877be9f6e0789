"""embedding: rows of a table by token id, with a guard on the vocabulary."""

from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise.embedding import rows


@checks.operator
def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table.

        y[..., :] = weight[input_ids[...], :]

    Args:
        input_ids: int32 or int64 [...], in [0, V).
        weight: [V, D], any floating dtype.

    Returns:
        [..., D] in weight's dtype.

    Raises:
        ValueError: an id outside [0, V), with its position. On CUDA it reads the nearest row, and
            the next slipstream call or slipstream.synchronize() raises; this one does with
            SLIPSTREAM_CHECK=sync in the environment. TypeError: dtypes.

    Cost: one read of the rows; on the CPU one of the ids. The gradient is dense, [V, D].
    """
    checks.expect_rank("weight", weight, 2, "[V, D]")
    checks.expect_index("input_ids", input_ids)
    checks.expect_floating({"weight": weight})
    checks.expect_one_device({"weight": weight, "input_ids": input_ids})
    return rows(input_ids, weight)
