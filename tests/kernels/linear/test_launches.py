"""The interface by which op.py calls all launches, and the fallback from one to another."""

import pytest
import torch
from torch import Tensor

from slipstream.common.varlen import ChunkMap, chunk_map
from slipstream.compiler.trace import trace
from slipstream.kernels.linear import op
from slipstream.kernels.linear.backend import SavedWY
from slipstream.kernels.linear.inputs import BackwardCall, LinearInputs
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.memory import make

pytestmark = pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="wants Triton's JIT")


@pytest.mark.parametrize("kind", ["delta_rule", "gated"])
def test_portable_backward_after_gluon_forward(kind: str) -> None:
    def call(device: torch.device) -> None:
        terms = make(kind, (8192,), 32, device)
        save = op.Extras(save=True)
        o, _, *saved = op.forward_impl(*terms, 0.1, 64, "sm90", False, extras=save)
        assert len(saved) == len(SavedWY._fields)
        call = BackwardCall(o, None, 0.1, 64, "triton", gate_gradient=terms.g is not None)
        grads = op.by_name(terms, True, op.backward_impl(*terms, *call, *saved))
        assert grads["q"].shape == terms.q.shape

    names = [x.name for x in trace(call, "sm_90", backward=False)]
    assert any("sm90" in x for x in names) and "delta_chunk_dstate_kernel" in names


def test_gates_far_apart_are_laid_side_by_side() -> None:
    """The portable scan counts a gate's place in 32 bits."""
    from slipstream.kernels.linear.inputs import contiguous

    x = torch.empty(64, 8192, 8, 64, device="meta")
    g = torch.empty(64, 8192, 8192, device="meta")[..., :8]
    assert contiguous(LinearInputs(x, x, x, g=g)).g.is_contiguous()  # pyright: ignore
    near = torch.empty(2, 8192, 8192, device="meta")[..., :8]
    assert contiguous(LinearInputs(x[:2], x[:2], x[:2], g=near)).g is near


def test_tokens_that_no_sequence_has_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a place for each of them, as on a GPU, where nobody looks at offsets before; it was past
    all states."""
    from slipstream.kernels.linear.eager import recurrent
    from slipstream.kernels.linear.eager.recurrent import recurrent_backward

    def on_device(cu: Tensor, tokens: int, chunk: int) -> ChunkMap:
        found, none = chunk_map(cu, tokens, chunk), torch.tensor([False, False])
        past = torch.full((2,), cu.shape[0] - 1)
        return found._replace(
            sequence=torch.cat([found.sequence, past]),
            first=torch.cat([found.first, none]),
            last=torch.cat([found.last, none]),
        )

    monkeypatch.setattr(recurrent.varlen, "check_cu_seqlens_values", lambda *args: None)
    x = torch.rand(1, 9, 2, 4, dtype=torch.float64)
    state = torch.rand(2, 2, 4, 4, dtype=torch.float64)
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    terms = LinearInputs(x, x, x, beta=x[..., 0], initial_state=state, cu_seqlens=cu)
    short = terms._replace(q=x[:, :7], k=x[:, :7], v=x[:, :7], beta=x[:, :7, :, 0])
    want = recurrent.recurrent_forward(short, 0.5)
    wanted = recurrent_backward(short, x[:, :7], state, 0.5)
    monkeypatch.setattr(recurrent.varlen, "chunk_map", on_device)
    o, final = recurrent.recurrent_forward(terms, 0.5)
    assert torch.equal(o[:, :7], want[0])
    assert torch.equal(final, want[1])
    grads = recurrent_backward(terms, x, state, 0.5)
    for name, y in wanted.items():
        assert torch.equal(grads[name] if name == "initial_state" else grads[name][:, :7], y), name
