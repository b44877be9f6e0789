"""The erase vector before a recurrence."""

from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.kernels.elementwise import erase as op
from slipstream.runtime import dispatch

NAMES = ("chunk_gdn2", "fused_recurrent_gdn2")


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_named_plain_torch_chooses_no_kernel(
    name: str, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a call in float64 on a GPU warns that it runs in plain torch, which it asked for."""

    choose = dispatch.choose

    def refused(candidates: Any, *args: Any) -> Any:
        assert candidates is not op._CANDIDATES, "a kernel was looked for"
        return choose(candidates, *args)

    monkeypatch.setattr(dispatch, "choose", refused)
    q, k, v, g, b, w = torch.rand(6, 1, 5, 2, 16, dtype=torch.float64).unbind()
    terms = {"q": q, "k": k, "v": v, "g": -g, "b": b, "w": w}
    o, _ = getattr(ops, name)(**terms, impl=impl)
    assert o.isfinite().all()
    with pytest.raises(AssertionError, match="looked for"):
        getattr(ops, name)(**terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_erased_keys_are_decayed(dtype: torch.dtype) -> None:
    """By b too, where there is one."""
    g, k, b = torch.rand(3, 1, 5, 2, 16, dtype=dtype).unbind()
    torch.testing.assert_close(op.erase(-g, k, None), -(-g).exp() * k)
    torch.testing.assert_close(op.erase(-g, k, b), -(-g).exp() * b * k)
