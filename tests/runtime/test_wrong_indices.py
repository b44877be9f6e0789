"""Kernels under the interpreter whose indices are outside of what they index, which a device finds
out after the launch: they touch no other memory, and one that is past a pool means what a negative
one does, none."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from slipstream.runtime.token_ids import INDICES, TABLES, WrongId, raise_pending
from slipstream.tools.catalog import OPERATORS, Sample, flat
from tests.support.decode_pool import HV, SLOTS, K, V, make, step
from tests.support.in_bounds import in_bounds
from tests.support.interpreted import interpreted
from tests.support.operators import Args, Size, each, with_grads

# what the host looks at before a launch on a CPU, and on a GPU does not
LOOKS = ("expect_below", "expect_ids", "expect_offsets", "expect_unique", "check_values")
WRONG = {torch.int32: (1, 1 << 20, -(1 << 20)), torch.int64: (1 << 40, -(1 << 62))}
# of the memory around what a kernel is given
ROWS_AROUND = 2

# of packed sequences, one of each kernel
PACKED = "attention-packed", "chunk_hgrn", "chunk_rwkv4", "selective_scan-groups"
PACKED += "short_convolution-packed", "token_shift-packed", "recurrent_step", "chunk_mamba3"
PACKED += ("chunk_gla",)
SIZE = Size(T=4, H=1, HV=2, K=12, V=12)


def arange(B: int) -> Tensor:
    return torch.arange(B)


# indices that rows of the catalog leave out, of B sequences; of pages each sequence has one
OPTIONAL: dict[str, Callable[[int], Tensor]] = {
    "state_indices": arange, "cache_batch_idx": arange,
    "cache_leftpad": lambda B: torch.zeros(B, dtype=torch.int64),
    "block_table": lambda B: torch.arange(B)[:, None], "table": lambda B: torch.arange(B)[:, None],
}  # fmt: skip
# and those that they have
GIVEN = ("cache_seqlens", "key_lengths", "lengths", "positions", "target", "input_ids")
# rows that add no load or store by an index to those of others
OMITTED = ("gates", "one sequence", "channel", "drafts", "bias", "first value", "interleaved")
OMITTED += ("mean", "sum", "packed-cache")
# what the functions of compat and integrations call the same, and what models index by torch
ELSEWHERE = {"conv_state_indices", "indices", "slots", "into_slots"}
ELSEWHERE |= {"state_batch_indices", "dst_state_batch_indices"}
ELSEWHERE |= {"beam_idx", "batch_select_indices", "logits_to_keep"}
# of four tokens
OFFSETS = ((0, 94, 3), (0, -100, 4), (5, 2, 1))


def surrounded(x: Tensor) -> Tensor:
    """x in the middle of a larger memory, of which no row before it or after it is the kernel's."""
    wide = x.new_zeros(x.shape[0] + 2 * ROWS_AROUND, *x.shape[1:])
    return wide[ROWS_AROUND:-ROWS_AROUND].copy_(x)


def function(row: Sample) -> Callable[..., Any]:
    """The operator, by its kernels."""
    if row.op == "embedding":
        from slipstream.kernels.elementwise.triton.embedding import gather

        return lambda input_ids, weight: gather(input_ids, weight)
    return row.fn


def call(row: Sample, args: Args) -> list[Tensor]:
    """Its outputs and what it writes into, with memory around all of them."""
    given = {n: each(surrounded, x) if n not in OPTIONAL else x for n, x in args.items()}
    options = row.options | ({"impl": "triton"} if "impl" in row.takes else {})
    with torch.no_grad(), in_bounds():
        outputs = flat(function(row)(**given, **options))
    return [*outputs, *(given[x] for x in row.written.split())]


def check_index(row: Sample, name: str) -> None:
    args = row.inputs(SIZE)
    if name in OPTIONAL:
        args[name] = OPTIONAL[name](SIZE.B)
    right = args[name]
    for dtype in WRONG if name in OPTIONAL else (right.dtype,):
        indices = right.to(dtype, copy=True)
        found = []
        for wrong in (-1, *WRONG[dtype]):
            # past what there is by one, and by more
            indices.view(-1)[-1] = right.max() + 1 if wrong == 1 else wrong
            found.append(call(row, args | {name: indices}))
            if name in TABLES:  # what kernels find they report
                with suppress(WrongId):
                    raise_pending()
        if name in OPTIONAL and name != "cache_leftpad":
            for outputs in found[1:]:
                for x, y in zip(outputs, found[0], strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def check_offsets(row: Sample, wrong: tuple[int, ...]) -> None:
    """Forward and backward."""
    args = row.inputs(replace(SIZE, B=1, lengths=(1, 3)))
    given = {n: each(surrounded, x) for n, x in args.items()}
    given["cu_seqlens"] = torch.tensor(wrong)
    options = {"impl": "triton"} if "impl" in row.takes else {}
    with in_bounds():
        with_grads(lambda x: flat(row.fn(**x, **row.options, **options)), given)


def check_step(wrong: tuple[int, ...]) -> None:
    """recurrent_step, whose sequences lie in a pool."""
    terms = make("kda", (1, 3))._replace(cu_seqlens=torch.tensor(wrong))
    terms = terms._replace(**{x: surrounded(getattr(terms, x)) for x in ("q", "k", "v", "g")})
    pool = surrounded(torch.randn(SLOTS, HV, K, V))
    with in_bounds():
        step(terms, pool, state_indices=torch.tensor([4, 2]), impl="triton")


def launch_unlooked() -> None:
    """As on a GPU."""
    for module in [x for n, x in sys.modules.items() if n.startswith("slipstream.")]:
        for look in LOOKS:
            if hasattr(module, look):
                patch.object(module, look, lambda *_, **__: None).start()


@interpreted
def test_wrong_indices_touch_no_other_memory() -> None:
    launch_unlooked()
    seen = set(ELSEWHERE)
    for row in OPERATORS:
        args = row.inputs(SIZE) if row.variant not in OMITTED else {}
        for name in row.takes:
            if args and (name in OPTIONAL or (name in GIVEN and name in args)):
                check_index(row, name)
                seen.add(name)
    assert seen >= {*TABLES, *INDICES}, {*TABLES, *INDICES} - seen


@interpreted
@pytest.mark.parametrize("name", PACKED)
def test_wrong_offsets_touch_no_other_memory(name: str) -> None:
    launch_unlooked()
    for wrong in OFFSETS:
        if name == "recurrent_step":
            check_step(wrong)
        else:
            check_offsets(next(x for x in OPERATORS if x.name == name), wrong)
