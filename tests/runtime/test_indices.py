"""Kernels that look for indices that are too large, under Triton's interpreter, against the rule
that holds on the CPU."""

import pytest
import torch
from torch import Tensor

from slipstream.runtime import token_ids
from tests.support.interpreted import interpreted


def message() -> str:
    """The error that the next call would raise."""
    try:
        token_ids.raise_pending()
    except ValueError as error:
        return str(error)
    return ""


def on_cpu(name: str, indices: Tensor, size: int, **options: object) -> bool:
    """Whether the CPU raises."""
    try:
        token_ids.expect_below(name, indices, size, "rows", **options)  # pyright: ignore
    except ValueError:
        return True
    return False


def check_indices() -> None:
    from slipstream.runtime import token_ids_kernel

    token_ids_kernel.BLOCK, token_ids_kernel.SLOTS = 8, 4  # several blocks a program
    found = 0
    for i in range(60):
        torch.manual_seed(i)
        N, W = int(torch.randint(1, 9, ())), int(torch.randint(1, 7, ()))
        table = torch.randint(-3, 12, (N, W), dtype=torch.int32)
        lengths = torch.randint(-2, 4 * W, (N,), dtype=torch.int32)
        rows = torch.randint(-1, 3, (N,))
        for size in (9, 11, 12):
            given = (size, lengths, i % 3, 4, None)
            token_ids_kernel.scan_indices("block_table", table, *given)
            want = on_cpu("block_table", table, size, lengths=lengths, more=i % 3, step=4)
            assert (message() != "") == want, (i, size)
            token_ids_kernel.scan_indices("cache_seqlens", lengths, size, None, 0, 1, rows)
            assert (message() != "") == on_cpu("cache_seqlens", lengths, size, rows=rows)
            found += want
    assert 20 < found < 160
    token_ids_kernel.scan_indices(
        "state_indices", torch.tensor([0, -1, 5, 1 << 40]), 5, None, 0, 1, None
    )
    assert message() == "state_indices: want less than 5, got 5 at position (2,)"
    token_ids_kernel.scan_indices(
        "block_table", torch.tensor([[0, 1], [9, 1]]), 9, None, 0, 1, None
    )
    assert message() == "block_table: want less than 9, got 9 at position (1, 0)"


def check_offsets() -> None:
    from slipstream.runtime import token_ids_kernel

    for offsets, wrong in [
        ([0, 3, 3, 9], None), ([0], None), ([0, 9], None), ([1, 9], 0), ([0, 8], 1),
        ([0, 5, 4, 9], 2), ([0, 12, 9], 1), ([0, 10], 1), ([0, -1, 9], 1),
        ([*range(40), 9], 10), ([0, 9, 9, 7], 3),
    ]:  # fmt: skip
        for dtype in (torch.int32, torch.int64):
            total = 0 if offsets == [0] else 9
            token_ids_kernel.scan_offsets("cu_seqlens", torch.tensor(offsets, dtype=dtype), total)
            want = "" if wrong is None else (
                f"cu_seqlens: want offsets from 0 to the {total} tokens given that never fall, got "
                f"{offsets[wrong]} at position ({wrong},)"
            )  # fmt: skip
            assert message() == want, (offsets, message())


def test_indices_are_checked_again_when_changed() -> None:
    x, lengths = torch.tensor([0, 3]), torch.tensor([4, 4])
    looked = token_ids._looked_at
    assert [looked("table", x, 5, lengths) for _ in range(3)] == [False, True, True]
    assert not looked("table", x, 4, lengths)
    x[0] = 7
    assert not looked("table", x, 4, lengths)
    lengths.add_(1)
    assert not looked("table", x, 4, lengths)
    assert not looked("table", x.clone(), 4, lengths)
    assert looked("block_table", x, 4) is False and looked("block_table", x, 4) is True
    with torch.inference_mode():
        y = torch.tensor([0])
        assert not looked("table", y, 4) and not looked("table", y, 4)


def test_indices_found_wrong_are_checked_again() -> None:
    x = torch.tensor([9])
    assert [token_ids._looked_at("table", x, 4) for _ in range(2)] == [False, True]
    slots = token_ids.slots_for(x)
    slots[:6] = torch.tensor([1, 1, 9, 4, 0, token_ids.NAMES.index("table")])
    with pytest.raises(ValueError, match="table: want less than 4, got 9"):
        token_ids.raise_pending()
    assert not token_ids._looked_at("table", x, 4)


@interpreted
def test_kernels_find_what_the_cpu_refuses() -> None:
    check_indices()
    check_offsets()
