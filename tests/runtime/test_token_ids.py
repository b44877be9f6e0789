"""When a wrong index is reported: with the next call, or at once with SLIPSTREAM_CHECK=sync."""

import contextlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.runtime import token_ids
from slipstream.runtime.call_recorder import CallRecorder
from slipstream.runtime.recording import use_recorder


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
