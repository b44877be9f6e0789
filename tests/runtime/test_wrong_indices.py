"""Kernels that look for indices that are too large, under the interpreter: they find what the CPU
refuses, touch no other memory, and one that is past a pool means what a negative one does, none.
When it is reported: with the next call, or at once with SLIPSTREAM_CHECK=sync."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from slipstream.runtime import token_ids
from slipstream.runtime.call_recorder import CallRecorder
from slipstream.runtime.recording import use_recorder
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
    "state_indices": arange,
    "cache_batch_idx": arange,
    "cache_leftpad": lambda B: torch.zeros(B, dtype=torch.int64),
    "block_table": lambda B: torch.arange(B)[:, None],
    "table": lambda B: torch.arange(B)[:, None],
}
# and those that they have
GIVEN = ("cache_seqlens", "key_lengths", "lengths", "positions", "target", "input_ids")
GIVEN += ("selected",)
# rows that add no load or store by an index to those of others
OMITTED = ("gates", "one sequence", "channel", "drafts", "bias", "first value", "interleaved")
OMITTED += ("mean", "sum", "packed-cache")
# what the functions of compat and integrations call the same, and what models index by torch
ELSEWHERE = {"conv_state_indices", "indices", "slots", "into_slots"}
ELSEWHERE |= {"state_batch_indices", "dst_state_batch_indices", "state['length']"}
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
                torch.testing.assert_close(outputs, found[0], rtol=0, atol=0, equal_nan=True)


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


def check_ids() -> None:
    from slipstream.runtime import token_ids_kernel

    for i in range(30):
        torch.manual_seed(i)
        ids, ignored = torch.randint(-1, 7, (int(torch.randint(0, 40, ())),)), (None, -1, 3)[i % 3]
        size, counted = 6 + i % 2, ids != (-9 if ignored is None else ignored)
        bad = ((ids < 0) | (ids >= size)) & counted
        token_ids_kernel.scan("input_ids", ids, size, ignored)
        first = f"id {ids[bad][0]} at position ({int(bad.nonzero()[0])}," if bad.any() else ""
        assert first in (said := message()) and bool(first) == bool(said)
        if ignored is not None:
            for within in (None, size):
                got = token_ids_kernel.scan_inverse_count("target", ids, ignored, within)
                assert got == 1 / counted.sum().clamp_min(1)
                assert bool(message()) == bool(within and bad.any())


def check_offsets_rule() -> None:
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
    check_ids()
    check_offsets_rule()


@pytest.mark.parametrize("value", [None, "sync"])
def test_wrong_ids_are_waited_for_if_asked(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """SLIPSTREAM_CHECK=sync: the call that read the id raises, else the one after it."""
    monkeypatch.delenv("SLIPSTREAM_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("SLIPSTREAM_CHECK", value)
    spec = importlib.util.spec_from_file_location("fresh_ids", token_ids.__file__)
    assert spec is not None and spec.loader is not None
    fresh: Any = importlib.util.module_from_spec(spec)  # the flag is read at the import
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(fresh, "HAVE_TRITON", True)

    def scan(*args: Any) -> None:  # as the kernel: position + 1, id, size, last length, name
        slots = fresh.slots_for(torch.zeros(1, dtype=torch.long))
        slots[:6] = torch.tensor([1, 3 + 1, 149, 50, 2, 0])

    monkeypatch.setattr(fresh, "_scan", scan)
    ids = SimpleNamespace(is_cuda=True, device=SimpleNamespace(type="cuda"), numel=lambda: 4)
    words = r"input_ids: id 149 at position \(1, 1\) .* of 50"
    with contextlib.nullcontext() if value is None else pytest.raises(ValueError, match=words):
        fresh.expect_ids("input_ids", ids, 50)
    with pytest.raises(ValueError, match=words) if value is None else contextlib.nullcontext():
        fresh.raise_pending()
    fresh.raise_pending()


def test_other_ways_to_check_ids_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CHECK", "snyc")
    spec = importlib.util.spec_from_file_location("fresh_ids", token_ids.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ValueError, match="SLIPSTREAM_CHECK: want sync or nothing, got 'snyc'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_earlier_wrong_id_is_raised_while_recording() -> None:
    watch, taking = token_ids._Watch(-1), CallRecorder(())
    watch.slots[:6] = torch.tensor([1, 1 + 2, 9, 8, 0, token_ids.NAMES.index("cu_seqlens")])
    with taking, use_recorder(taking), pytest.raises(token_ids.WrongId, match="got 9"):
        watch.read()
    assert watch.word.value == 0 and not watch.slots.any()


@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("look", ["synchronize", "launched", "raise_pending"])
def test_devices_are_waited_for_before_their_slots_are_read(
    look: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device's programs find is there once they have ended; the first position is named."""
    watch, name = token_ids._Watch(-1), token_ids.NAMES.index("input_ids")
    watch.index = index
    monkeypatch.setattr(token_ids, "_watches", [watch])
    monkeypatch.setattr(token_ids, "SYNC", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def end(which: int) -> None:
        assert which == index
        watch.slots[:6] = torch.tensor([1, 4 + 1, 149, 50, 0, name])

    monkeypatch.setattr(torch.cuda, "synchronize", end)
    if look == "raise_pending":  # a later program is done
        watch.slots[0], watch.slots[6:11] = 1, torch.tensor([9 + 1, 200, 50, 0, name])
    with pytest.raises(token_ids.WrongId, match=r"id 149 at position \(4,\)"):
        getattr(token_ids, look)()


def test_host_memory_has_no_device_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
    token_ids._Watch(-1).wait()
