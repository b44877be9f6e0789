"""Calls of sizes not seen before are played from records, with the bits of the call as it is."""

from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.runtime import call_replay
from slipstream.tools.catalog import SAMPLES, Sample, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU"),
]
_PLAY = call_replay.RecordedCall.play
# Of a row's calls: after the first ones most are of sizes that a record holds for.
TURNS, WARM = 9, 5
CASES = [
    (sample, packed)
    for sample in SAMPLES
    if not sample.random
    for packed in ((False, True) if "cu_seqlens" in sample.takes else (False,))
]


def results(sample: Sample, args: dict[str, Any]) -> list[Tensor]:
    """Outputs, then gradients."""
    given = {n: x.detach().clone() for n, x in args.items() if isinstance(x, Tensor)}
    floating = torch.bfloat16, torch.float32
    leaves = [
        x.requires_grad_()
        for n, x in given.items()
        if x.dtype in floating and n not in sample.fixed.split()
    ]
    outs = sample.call({**args, **given})
    wanted = [x for x in outs if x.requires_grad]
    if not wanted:
        return outs
    loss = torch.stack([x.float().square().sum() for x in wanted]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outs, *(x for x in grads if x is not None)]


def shape_of(random: Random, packed: bool, turn: int) -> Shape:
    most = 2500 if turn % 3 == 2 else 400
    lengths = tuple(random.randint(1, most // 5) for _ in range(random.randint(2, 20)))
    return Shape(
        B=random.randint(1, 4), T=random.randint(20, most), H=4, K=64, V=64, D=256, Z=501,
        state=True, lengths=lengths if packed else None,
    )  # fmt: skip


@pytest.mark.parametrize(("sample", "packed"), CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_other_sizes_are_the_call(sample: Sample, packed: bool) -> None:
    random, played = Random(0), 0
    for turn in range(TURNS):
        torch.manual_seed(turn)
        shape = shape_of(random, packed or sample.packed, turn)
        args = sample.inputs(shape, torch.device("cuda"))
        with mock.patch.object(
            call_replay.RecordedCall, "play", autospec=True, side_effect=_PLAY
        ) as play:
            got = results(sample, args)
        played += play.call_count if turn >= WARM else 0
        with mock.patch.object(call_replay, "ENABLED", False):
            want = results(sample, args)
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x.nan_to_num(3.0), y.nan_to_num(3.0)), shape
    assert played or not sample.op.startswith(("chunk_", "attention", "rms_norm"))
