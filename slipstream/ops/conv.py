"""short_convolution: depthwise, causal, a few taps; and its one-step update."""

from typing import Any

import torch
from torch import Tensor

from slipstream.common import checks
from slipstream.kernels.conv import eager, op
from slipstream.kernels.conv.inputs import UNIT_TENSORS, ConvInputs, UpdateInputs
from slipstream.ops.norm import l2_norm
from slipstream.runtime import autograd, dispatch, token_ids, trees
from slipstream.runtime.consistent import consistent_scope
from slipstream.runtime.context_exchange import tie
from slipstream.runtime.context_parallel import ContextParallel


@checks.operator
@trees.as_context
def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: ContextParallel | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution along the tokens.

        y_t = f(sum_{j=0..W-1} weight[:, j] x_{t-W+1+j} + bias) + residual_t

    Args:
        x: [B, T, D], any floating dtype; 16-bit inputs are summed in float32.
        weight: [D, W], the last tap on the current token; any floating dtype.
        bias: [D], any floating dtype; None is 0.
        activation: f, "silu" (also "swish") or None for none.
        residual: shape of x; None is 0.
        initial_state: [N, D, W], the last W inputs of each sequence before this call, oldest
            first; None is 0. The oldest is not read.
        output_final_state: also return the state after the last token.
        cu_seqlens: int32 or int64 [N+1], offsets of N sequences packed in B = 1; N = B without.
        parents: int32 or int64 [N], the earlier sequence at whose end each goes on, -1 for none: a
            row of prefix trees (PrefixTree).
        context: a slipstream.parallel.ContextParallel, with this rank's tokens, the states of all
            sequences and no cu_seqlens. None: one rank has all tokens.
        impl: None chooses; "eager", "triton" or "reference" is used or refused.

    Returns:
        y in x's shape and dtype, and the final state [N, D, W] in x's dtype, or None.

    Raises:
        ValueError: a shape does not fit, the activation is unknown, or cu_seqlens are no offsets.
        TypeError: not floating, or cu_seqlens not an integer.

    Cost: 2 B T D W flops; the state is W numbers a channel and sequence.
    Source: Poli et al., Hyena Hierarchy, 2023, section 3; calls as in the causal_conv1d package,
        except for the layout [B, T, D].
    """
    if context is not None and torch.compiler.is_compiling():
        return context.eagerly(
            short_convolution, x, weight, bias, activation=activation, residual=residual,
            initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens, context=context, impl=impl,
        )  # fmt: skip
    given = (x, weight, bias, activation, residual, initial_state, output_final_state)
    (y,), final = _convolve(*given, cu_seqlens, context, impl, None)
    return y, final


@checks.operator
@trees.as_context
def split_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: tuple[int, int, int],
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    parents: Tensor | None = None,
    context: ContextParallel | None = None,
    unit: int = 0,
) -> tuple[list[Tensor], Tensor | None]:
    """short_convolution whose channels come as three tensors [B, T, n], n of sizes, not as views of
    one: so what follows reads each in one piece, as kernels want it, without a copy.

    unit: channels of a head of the first two tensors, each of which l2_norm makes one long, within
    the convolution where its kernels do; else what they were before follows the three. 0 leaves
    them as they are.
    """
    given = (x, weight, bias, activation, None, initial_state, output_final_state)
    return _convolve(*given, cu_seqlens, context, None, sizes, unit)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    context: ContextParallel | None,
    impl: str | None,
    sizes: tuple[int, ...] | None,
    unit: int = 0,
) -> tuple[list[Tensor], Tensor | None]:
    """y, or its channels in tensors of so many, and the final state."""
    checks.expect_rank("x", x, 3, "[B, T, D]")
    _check(x, weight, bias, activation)
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
    if initial_state is not None:
        checks.expect_shape("initial_state", initial_state, (sequences, *weight.shape))
    if residual is not None:
        checks.expect_shape("residual", residual, x.shape)
    checks.expect_floating({"initial_state": initial_state, "residual": residual})
    given = {"x": x, "residual": residual, "initial_state": initial_state}
    checks.expect_one_device({**given, "cu_seqlens": cu_seqlens})
    whole, row = initial_state, x
    if share is not None:
        row, initial_state, past = share.states_before(x, weight.shape[1], initial_state)
    inputs = ConvInputs(row, weight, bias, residual, initial_state, cu_seqlens)
    impl = dispatch.choose(op.CANDIDATES, inputs, impl, "short_convolution", x).impls
    silu = activation is not None
    if dispatch.is_triton(impl):
        # rows of a part begin at multiples of 16 bytes, as the kernels' loads want them
        apart = sizes is not None and past is None and not any(n % 8 for n in sizes)
        parts = sizes if apart else None
        # a consistent model's step rounds before it takes norms (mixer_step/triton/block_inputs.py)
        within = parts is not None and not consistent_scope.on and op.normalises(parts, unit)
        ys = op.convolution(inputs, silu, impl, parts, unit if within else 0)
        unit = 0 if within else unit
    else:
        by = [_by_definition] if impl == "reference" else []
        ys = [eager.convolution(inputs, silu, *by)]
    if past is not None:
        ys = [tie(ys[0], past)]
    if sizes is not None and len(ys) == 1:
        ys = [*ys[0].split(sizes, -1)]
    if unit:
        ys = unit_heads(ys, unit)
    if not output_final_state:
        return ys, None
    state = None if initial_state is None else initial_state.to(x.dtype)
    final = eager.last_inputs(x, weight.shape[1], state, cu_seqlens)
    if share is not None:
        final = share.whole_states(tie(final, x), whole, 1 if share.packed else x.shape[0])
    return ys, final


@checks.operator
def short_convolution_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    state_indices: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Computes a token of short_convolution for each of N sequences, and updates states in place.

    Args:
        x: [N, D] or [N, 1, D], any floating dtype.
        state: [N, D, W], any floating dtype and strides, as short_convolution returns it;
            overwritten. With state_indices a pool [S, D, W].
        weight, bias, activation, residual: as short_convolution; residual in x's shape.
        state_indices: int32 or int64 [N], which state of the pool is each sequence's, none twice;
            below 0 there is none: nothing is written and y is 0.
        impl: as short_convolution; Triton makes no gradients here.

    Returns:
        y in x's shape and dtype. Gradients reach x and weight, not what the state held before.

    Raises:
        ValueError: a shape does not fit, the activation is unknown or, on the CPU, an index is past
            the pool. TypeError: dtypes.

    Cost: 2 N D W flops, one read and write of the state.
    """
    if x.dim() == 3:
        checks.expect_shape("x", x, (x.shape[0], 1, x.shape[2]))
    else:
        checks.expect_rank("x", x, 2, "[N, D] or [N, 1, D]")
    _check(x, weight, bias, activation)
    slots = x.shape[0]
    if state_indices is not None:
        checks.expect_rank("state", state, 3, "[S, D, W]")
        checks.expect_index("state_indices", state_indices, x.shape[:1])
        slots = state.shape[0]
        if state_indices.is_cuda:  # plain torch looks on the CPU
            token_ids.expect_below("state_indices", state_indices, slots, "states")
    checks.expect_shape("state", state, (slots, *weight.shape))
    checks.expect_floating({"state": state, "residual": residual})
    checks.expect_own_memory("state", state)
    given = {"x": x, "state": state, "residual": residual, "state_indices": state_indices}
    checks.expect_one_device(given)
    if residual is not None:
        checks.expect_shape("residual", residual, x.shape)
    token = x.reshape(x.shape[0], x.shape[-1])
    call = (x, weight, bias, residual, state)
    impl = dispatch.choose(op.UPDATE_CANDIDATES, call, impl, "short_convolution_update", x).impls
    extra = None if residual is None else residual.reshape(token.shape)
    inputs = UpdateInputs(token, state, weight, bias, extra, state_indices)
    silu = activation is not None
    # which states there are is not known to a trace, or on meta
    traced = (torch.compiler.is_compiling() and not autograd.wants_gradient(*inputs)) or x.is_meta
    if traced or dispatch.is_triton(impl):
        return op.call_update(*inputs, silu=silu, impl=impl).view(x.shape)
    return eager.update(inputs, silu).view(x.shape)


def unit_heads(ys: list[Tensor], unit: int) -> list[Tensor]:
    """The tensors, heads of `unit` channels of the first two made one long, and these two."""
    heads = (l2_norm(y.unflatten(-1, (-1, unit))).flatten(-2) for y in ys[:UNIT_TENSORS])
    return [*heads, *ys[UNIT_TENSORS:], *ys[:UNIT_TENSORS]]


def _by_definition(*args: Any) -> Tensor:
    return eager.conv_reference(*args)[0]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    checks.expect_rank("weight", weight, 2, "[D, W]")
    checks.expect_shape("weight", weight, (x.shape[-1], weight.shape[1]))
    if weight.shape[1] < 1:
        raise ValueError("weight: want at least one tap, got shape (D, 0)")
    if bias is not None:
        checks.expect_shape("bias", bias, x.shape[-1:])
    checks.expect_floating({"x": x, "weight": weight, "bias": bias})
    checks.expect_one_device({"x": x, "weight": weight, "bias": bias})
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation: want "silu", "swish" or None, got {activation!r}')
