"""The kernel variants that calls of a tree ask for on a GPU that is not there."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from slipstream.compiler.aot import Job
from slipstream.compiler.trace import trace
from slipstream.ops import PrefixTree
from slipstream.runtime import prefix_tree, rows
from slipstream.tools.samples import Sample, Shape

PLAIN_TABLES = rows.Rows._on


def copied(x: Tensor, device: torch.device) -> Tensor:
    """A fake of x there."""
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def tables(self: rows.Rows, name: str, device: torch.device, make: Any) -> tuple[Tensor, ...]:
    def made() -> tuple[Tensor, ...]:
        with unset_fake_temporarily():
            return make()

    return PLAIN_TABLES(self, name, device, made)


def variants(
    sample: Sample, lengths: tuple[int, ...], parents: list[int], any_size: bool = False
) -> dict[str, Job]:
    """By their keys, on sm_90."""
    tree: Any = PrefixTree([0, *torch.tensor(lengths).cumsum(0).tolist()], parents)
    # what is made of numbers, before all tensors are fake
    assert [tree.levels, tree.from_levels, tree.states_from_levels, tree.nodes.last(1)]
    assert [tree.nodes._rows_before(width) for width in (1, 4)]

    def call(device: torch.device) -> Any:
        args = sample.inputs(Shape(B=1, H=8, D=2048, lengths=lengths), device, blank=True)
        offsets = args.pop("cu_seqlens")
        tree.cu_seqlens, tree.offsets_on = offsets, lambda device: offsets
        return sample.fn(**args, **sample.options, context=tree)

    with (
        mock.patch.object(rows, "copied", copied),
        mock.patch.object(prefix_tree, "copied", copied),
        mock.patch.object(rows.Rows, "_on", tables),
    ):
        return {job.key: job for job in trace(call, "sm_90", any_size=any_size)}
