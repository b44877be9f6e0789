"""The past keeps its bits when the future changes: Triton's kernels, under its interpreter.

tests/ops/test_properties.py has the same of plain torch.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.causality import changed_bits
from tests.support.interpreted import PARTS, interpreted
from tests.support.operators import LINEAR, Size

# one of each kernel; the others, and gates that grow weaker, are further
SAMPLE = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_comba", "chunk_kda")
SIZE = Size(B=1, T=40, H=1, HV=1, K=16, V=16)


def check(part: str) -> None:
    for op in LINEAR:
        if "chunk_" not in op.name or (part == "sample") != (op.name in SAMPLE):
            continue
        gates = (("weak", "strong"), ("strong", "weak"), ("mixed", "mixed"))
        found = changed_bits(op, "triton", SIZE, (5, 21), gates[: 1 if part == "sample" else 3])
        assert not found, f"{op.name}: {found}"
        print(op.name, "ok", flush=True)


def check_apart() -> None:
    """With halves of chunks apart, as bfloat16 has them, and exp2 as a GPU has it, whose last bits
    are others below 0: float32 shows every one of them."""
    from triton.runtime.interpreter import InterpreterBuilder

    from slipstream.kernels.linear.triton.dplr import tiles
    from slipstream.kernels.linear.triton.vector_decay import backend

    def exp2(x: np.ndarray) -> np.ndarray:
        y = np.exp2(x)
        return np.where((x < 0) & (x != np.floor(x)), np.nextafter(y, np.float32(np.inf)), y)

    def create_exp2(self: InterpreterBuilder, arg: object) -> object:
        return self.unary_op(arg, exp2)

    with (
        mock.patch.object(InterpreterBuilder, "create_exp2", create_exp2),
        mock.patch.dict(tiles.APART, {torch.float32: 11.0}),
        mock.patch.dict(backend.APART, {torch.float32: 55.0}),
        mock.patch.dict(backend.SHIFT, {torch.float32: 60.0}),
        mock.patch.dict(backend.BOUND, {torch.float32: 60.0}),
    ):
        for op in LINEAR:
            if op.name in ("chunk_kda", "chunk_dplr_delta_rule", "chunk_gla", "chunk_rwkv6"):
                gates = (("weak", "strong"), ("strong", "weak"))
                found = changed_bits(op, "triton", SIZE, (2, 10, 21), gates)
                assert not found, f"{op.name}: {found}"
                print(op.name, "apart ok", flush=True)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_past_keeps_its_bits_when_interpreted(part: str) -> None:
    check(part)
    if part == "sample":
        check_apart()
