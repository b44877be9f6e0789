"""New trees of any depth ask for no kernel variants that a first one, or its sizes, did not."""

import zlib
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream import ops
from slipstream.kernels.gated_scan import op as gated_scan
from slipstream.tools.catalog import OPERATORS, Sample
from tests.support import wants
from tests.support.prefix_trees import random_tree
from tests.support.traced_trees import variants

pytestmark = wants.compiler
# attention's tables are made of tensors, and what it launches depends on no depth
SAMPLES = [
    x for x in OPERATORS if "parents" in x.takes and not x.variant and not x.op.startswith("attent")
]
QUICK = {"chunk_simple_gla", "selective_scan", "chunk_hgrn", "short_convolution", "token_shift"}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda x: x.op)
@pytest.mark.sample(which=lambda sample: sample.op in QUICK)
def test_random_trees_ask_for_listed_variants(sample: Sample) -> None:
    random = Random(zlib.crc32(sample.op.encode()))
    listed = variants(sample, (600, 100, 50), [-1, 0, 0], any_size=True)
    assert "row_sums_kernel" in {x.name for x in listed.values()}
    trees = [((300, 100), [-1, -1]), ((300, 5, 9, 70, 100), [-1, 0, 1, 2, -1])]
    for lengths, parents in [*trees, *(random_tree(random) for _ in range(4))]:
        found = variants(sample, lengths, parents)
        new = {job.name: job.constants for key, job in found.items() if key not in listed}
        assert not new, f"{sample.op}, nodes {lengths} of {parents}: {new}"


@pytest.mark.parametrize("parents", [[-1, -1, -1], [-1, 0, 0], [-1, 0, 1]])
def test_states_of_every_depth_have_gradients(parents: list[int]) -> None:
    """So a scan's backward is the same of a leaf as of a node with children."""
    x, seen = torch.randn(1, 9, 4, requires_grad=True), []
    call = type(gated_scan._call_backward).__call__

    def note(self: Any, *args: Any, **named: Any) -> Any:
        if self is gated_scan._call_backward:
            seen.append(args[5])
        return call(self, *args, **named)

    with mock.patch.object(type(gated_scan._call_backward), "__call__", note):
        cu, given = torch.tensor([0, 4, 6, 9]), torch.tensor(parents)
        ops.chunk_hgrn(x, -x.abs(), cu_seqlens=cu, parents=given)[0].sum().backward()
    assert len(seen) == len({*parents}) and all(isinstance(y, Tensor) for y in seen)
