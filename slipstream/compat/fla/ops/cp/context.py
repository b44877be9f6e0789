"""fla.ops.cp.context: which tokens of packed sequences a rank has."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.parallel import ContextParallel


@dataclass
class FLACPContext:
    """The result of build_cp_context; without a group there is no context parallelism.

    Attributes:
        cu_seqlens, cu_seqlens_cpu: offsets of this rank's pieces of sequences, int32.
        is_first_rank, is_last_rank: whether its first piece begins a sequence here, and whether
            its last piece ends one.
        pre_num_ranks, post_num_ranks: ranks with earlier tokens of the first piece's sequence, and
            with later ones of the last piece's.
        pre_num_conv_tokens: earlier tokens of the first piece's sequence.
        plan: the same as slipstream.ops take it.
    """

    group: Any = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    is_last_rank: bool | None = None
    pre_num_ranks: int | None = None
    is_first_rank: bool | None = None
    post_num_ranks: int | None = None
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None
    plan: ContextParallel | None = None

    def copy_for_backward(self) -> "FLACPContext":
        return replace(self)

    @property
    def num_seqs(self) -> int:
        """Pieces of sequences here."""
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None


def build_cp_context(
    cu_seqlens: Tensor,
    group: Any,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    **kwargs: Any,
) -> FLACPContext:
    """The plan of a batch whose tokens are divided evenly among the ranks of a group.

    Args:
        cu_seqlens: offsets of the whole batch [N+1].
        conv1d_kernel_size: no effect.
        cu_seqlens_cpu: the same offsets on the CPU; without them the host waits for the device.

    Raises:
        ValueError: the tokens are not a multiple of the ranks. NotImplementedError: layout is
            "zigzag".
    """
    if kwargs:
        raise TypeError(f"build_cp_context: unexpected arguments: {', '.join(kwargs)}")
    if not use_tf32x3_affine_chain:
        raise ValueError("use_tf32x3_affine_chain: want True")
    if layout == "zigzag":
        raise NotImplementedError("layout: want contiguous; attention balances work by heads")
    if layout != "contiguous":
        raise ValueError(f"layout: want contiguous or zigzag, got {layout!r}")
    plan = ContextParallel(group, cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    whole, offsets = plan.whole_offsets_on(torch.device("cpu")), plan.offsets_on(cu_seqlens.device)
    assert whole is not None and offsets is not None
    begin, end = plan.bounds(int(whole[-1]))
    share = plan.share(end - begin)
    return FLACPContext(
        group=group,
        cu_seqlens=offsets,
        cu_seqlens_cpu=torch.tensor(share.local_offsets, dtype=torch.int32, device="cpu"),
        is_last_rank=not share.later,
        pre_num_ranks=len(share.earlier),
        is_first_rank=not share.earlier,
        post_num_ranks=len(share.later),
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=max(0, begin - share.offsets[share.pieces[0]]) if share.pieces else 0,
        plan=plan,
    )


def plan_of(cp_context: Any) -> ContextParallel | None:
    """The plan of an argument `cp_context`; None where it asks for nothing.

    Raises:
        TypeError: it is no context of build_cp_context's. ValueError: it has a group without a
            plan, made by hand.
    """
    if cp_context is None:
        return None
    wanted = "cp_context: want what fla.ops.cp.build_cp_context returns"
    if not isinstance(cp_context, FLACPContext):
        raise TypeError(f"{wanted}, got {type(cp_context).__name__}")
    if cp_context.group is not None and cp_context.plan is None:
        raise ValueError(f"{wanted}, got a group without a plan")
    return cp_context.plan
