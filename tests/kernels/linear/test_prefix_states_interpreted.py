"""States that Triton's kernels leave on their way, under Triton's interpreter, whole and in
segments."""

import torch

from tests.support.interpreted import interpreted
from tests.support.prefix_states import OPERATORS, Call, expect_prefix_states

LENGTHS = {"batch": None, "packed": (70, 0, 130)}


def in_segments() -> None:
    """Segments are a chunk of the largest tile."""
    from slipstream.kernels.linear import scalar_decay, vector_decay
    from slipstream.kernels.linear.triton.delta import plan
    from slipstream.kernels.linear.triton.dplr import backend

    plan.delta_tokens = lambda programs, T, C: 64
    assert backend.segments_for_programs.__module__ == plan.__name__
    for module in (scalar_decay, vector_decay):
        module.scalar_decay_tokens = lambda terms, programs, C, unit: 64


@interpreted
def test_states_are_left_when_interpreted() -> None:
    for segments in (False, True):
        if segments:
            in_segments()
        for operator in OPERATORS:
            for lengths in [*LENGTHS.values()][segments:]:  # in segments packed alone
                expect_prefix_states(
                    Call.make(operator, lengths, B=1, T=136, HV=1, impl="triton"), rtol=1e-4
                )
    for operator in OPERATORS:
        call = Call.make(operator, (70, 64), HV=1, impl="triton", consistent=True)
        _, pool, _ = call.run()
        alone = Call.make(operator, (70, 64), HV=1, impl="triton", consistent=True)
        for n, (_, begin, end) in enumerate(alone.places):
            piece = {name: x[:, begin:end] for name, x in alone.tensors.items()}
            single = Call(
                operator, piece, alone.state[n : n + 1], None, [(0, 0, end - begin)],
                alone.prefix._replace(rows=alone.prefix.rows[n : n + 1, : -(-(end - begin) // 64)]),
                alone.options,
            )  # fmt: skip
            single.run()
        assert torch.equal(alone.prefix.pool.nan_to_num(7), pool.nan_to_num(7)), operator
