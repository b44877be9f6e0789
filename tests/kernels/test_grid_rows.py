"""More rows than axes 1 and 2 of a grid take are launched a part at a time, with the same bits; the
kernel that adds up partial sums, under Triton's interpreter."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import slipstream
from slipstream.kernels.elementwise.place_tokens import place_tokens
from slipstream.kernels.mixer_step.block_inputs import block_inputs
from slipstream.kernels.time_mix import rwkv7_step
from slipstream.ops.conv import short_convolution_update
from slipstream.runtime import backends
from tests.support.block_inputs import inputs
from tests.support.interpreted import interpreted
from tests.support.rwkv7_steps import low_rank_inputs

N, LIMIT = 7, 3
# Of each file whose kernels use these axes how many programs they have there: what is not a
# model's is cut by backends.row_parts.
AXES = {
    "conv/triton_kernels": "rows, cut",
    "elementwise/triton/copy_states": "tiles of a state",
    "elementwise/triton/decay_gate": "blocks of channels",
    "elementwise/triton/embedding": "blocks of channels",
    "elementwise/triton/mamba_terms": "blocks of heads",
    "elementwise/triton/place_tokens": "rows, cut",
    "elementwise/triton/rotary": "blocks of heads",
    "elementwise/triton/row_sums": "blocks of columns",
    "elementwise/triton/token_shift": "blocks of channels",
    "hyper_connection/triton_kernels": "streams, eight at most; blocks of features; shares",
    "indexer/triton_kernels": "lists of a query",
    "matmul/triton_kernels": "shares of a sum, MAX_SPLIT_K at most; blocks of 512 columns",
    "mixer_step/triton/block_inputs": "rows, cut",
    "norm/triton_kernels": "blocks of channels; groups of channels",
    "primitives/device": "outputs, five at most",
    "projection_step/triton_kernels": "shares of a sum over a layer's channels",
    "running_mean/triton_kernels": "blocks of channels",
    "selected_attention/triton_entries": "units of a list; heads of keys",
    "selective_scan/triton_kernels": "SEQUENCE_PROGRAMS at most",
    "time_mix/triton/rwkv7": "heads",
    "time_mix/triton/rwkv7_step": "heads; matrices, four at most; blocks of rows, cut",
    "time_mix/triton/token_mix": "blocks of channels",
}


def test_programs_on_short_axes_are_bounded() -> None:
    root, found = Path(slipstream.__file__).parent, set()
    for path in root.rglob("*.py"):
        if re.search(r"program_id\((axis=)?[12]\)", text := path.read_text()):
            name = path.relative_to(root / "kernels").with_suffix("").as_posix()
            found.add(name)
            launch = path.with_name("triton_launch.py")
            text += launch.read_text() if launch.exists() else ""
            assert ("cut" in AXES.get(name, "")) == ("row_parts(" in text), name
    assert found == {*AXES}


def updated(indices: Tensor | None) -> list[Tensor]:
    x, residual, weight = torch.randn(N, 1, 5), torch.randn(N, 1, 5), torch.randn(5, 4)
    state = torch.randn(N if indices is None else 9, 4, 5).mT
    y = short_convolution_update(
        x, state, weight, torch.randn(5), residual=residual, state_indices=indices, impl="triton"
    )
    return [y, state]


def prepared(channels: tuple[int, ...]) -> list[Tensor]:
    tokens, blocks = inputs(N, 2, 16, channels)
    block_inputs(tokens, blocks, "triton")
    return [*blocks]


def placed() -> list[Tensor]:
    blocks = [torch.randn(N, 4, 3), torch.randn(N, 4, 5)]
    tokens = [torch.randn(N, 1, 3), torch.randn(N, 1, 9)[..., :5]]
    place_tokens(tokens, blocks, torch.tensor([3, 0, 1, 2, 3, -1, 0]), "triton")
    return blocks


def multiplied(ranks: tuple[int, ...]) -> list[Tensor]:
    return [rwkv7_step.low_rank(low_rank_inputs(50, 40, ranks, torch.float32), "triton")]


CALLS: dict[str, list[Callable[[], list[Tensor]]]] = {
    "conv_update_kernel": [
        partial(updated, None),
        partial(updated, torch.tensor([3, -1, 0, 8, 2, 9, 1])),
    ],
    "place_tokens_kernel": [placed],
    "block_inputs_kernel": [partial(prepared, ()), partial(prepared, (16,))],
    "low_rank_step_kernel": [partial(multiplied, (5, 3, 4)), partial(multiplied, (5, 3, 4, 2))],
}


@interpreted
@pytest.mark.parametrize("kernel", CALLS)
def test_rows_in_parts_have_equal_bits(kernel: str) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch, grids = GridExecutor.__call__, []

    def noting(self: GridExecutor, *args: object, **named: object) -> None:
        if self.fn.__name__ == kernel:
            grids.append(self.grid)
        launch(self, *args, **named)

    for call in CALLS[kernel]:
        found = []
        for limit in (backends.GRID_ROWS, LIMIT):
            torch.manual_seed(0)
            grids.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GridExecutor, "__call__", noting)
                patch.setattr(backends, "GRID_ROWS", limit)
                found.append(call())
            assert all(grid[-1] <= limit for grid in grids)
            assert (len(grids) > 1) == (limit == LIMIT)
        torch.testing.assert_close(*found, rtol=0, atol=0)


@interpreted
def test_partial_sums_match_torch() -> None:
    from slipstream.kernels.primitives.device import add_partial_sums

    for P, M, D in [(1, 1, 1), (600, 2, 33), (37, 5, 64), (513, 3, 70)]:
        for x in (torch.randn(P, M, D), torch.randn(M, P, D).transpose(0, 1)):
            outs = [None if i == 1 else torch.empty(D, dtype=torch.bfloat16) for i in range(M)]
            add_partial_sums(x, outs)
            for i, out in enumerate(outs):
                if out is not None:
                    torch.testing.assert_close(out, x[:, i].sum(0).bfloat16())
