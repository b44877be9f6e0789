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


def test_device_is_waited_for_before_slots_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    watch = object.__new__(token_ids._Watch)
    for watch.index in (-1, 0, 1):
        watch.wait()
    assert waits == [0, 1]
