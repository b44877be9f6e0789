"""token_shift: the previous token of each, across calls and never across sequences."""

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.elementwise.token_shift import previous
from slipstream.runtime import context_parallel, token_ids, trees
from slipstream.runtime.context_exchange import tie


@checks.operator
@trees.as_context
def token_shift(
    x: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: context_parallel.ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The token before each.

        y_t = x_{t-1}        y_0 = initial_state

    Args:
        x: [B, T, D], any floating dtype.
        initial_state: [N, D] in x's dtype, the last token of each sequence before this call;
            None is 0.
        output_final_state: also return the last token of each sequence.
        cu_seqlens: int32 or int64 [N+1], offsets of N sequences packed in B = 1; N = B without.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        impl: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        y in x's shape and dtype, not its difference from x, and the final state [N, D] or None.

    Raises:
        ValueError: shapes do not fit or cu_seqlens are no offsets. TypeError: dtypes.

    Cost: on CUDA one read and one write of x, forward and backward; elsewhere twice that if packed.
    Source: Peng et al., RWKV, 2023, section 3.1.
    """
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(
            token_shift, x, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, context=context, impl=impl,
        )  # fmt: skip
    checks.expect_rank("x", x, 3, "[B, T, D]")
    checks.expect_floating({"x": x})
    share = past = None
    if context is not None:
        context.expect_no_offsets(cu_seqlens, impl)
        cu_seqlens, share = context.offsets_on(x.device), context.share(x.shape[1])
    sequences = x.shape[0]
    if cu_seqlens is not None:
        checks.expect_cu_seqlens(cu_seqlens, *x.shape[:2])
        sequences = cu_seqlens.shape[0] - 1 if share is None else share.sequences
        if not torch.compiler.is_compiling():
            token_ids.expect_offsets("cu_seqlens", cu_seqlens, x.shape[1])
        cu_seqlens = cu_seqlens.contiguous()  # as the kernel reads them
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (sequences, x.shape[2]))
        checks.expect_one_dtype({"x": x, "initial_state": initial_state})
    if initial_state is not None or cu_seqlens is not None:
        checks.expect_one_device({"x": x, "initial_state": initial_state, "cu_seqlens": cu_seqlens})
    whole, row = initial_state, x
    if share is not None:
        columns = None if initial_state is None else initial_state[..., None]
        row, columns, past = share.states_before(x, 1, columns)
        initial_state = None if columns is None else columns[..., 0]
    y, last = previous(row, initial_state, cu_seqlens, impl)
    if past is not None:
        y = tie(y, past)
    if share is not None and output_final_state:
        last = share.whole_states(tie(last, x), whole, 1 if share.packed else x.shape[0])
    return y, last if output_final_state else None
