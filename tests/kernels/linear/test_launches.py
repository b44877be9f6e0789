"""The interface by which op.py calls all launches, and the fallback from one to another."""

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

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
MODULES = [
    "triton.scalar_decay.backend", "triton.vector_decay.backend", "triton.delta.backend",
    "triton.dplr.backend", "triton.decode_launch", "sm90.delta.backend", "sm90.dplr.backend",
    "sm90.scalar_decay.backend", "sm90.vector_decay.backend",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_backward_takes_saved_tensors(name: str) -> None:
    """Forward of one implementation, backward of the next: it gets nothing that it does not know.

    The delta rule's raised a TypeError where its kernels in Gluon gave way between the two.
    """
    module = import_module(f"slipstream.kernels.linear.{name}")
    assert hasattr(module, "forward")
    if module.CAPABILITIES.saves_wy:
        assert "saved" in inspect.signature(module.backward).parameters


@pytest.mark.parametrize("name", MODULES)
def test_capabilities_are_parameters(name: str) -> None:
    """A module's forward and backward take the arguments of its capabilities."""
    module = import_module(f"slipstream.kernels.linear.{name}")
    can = module.CAPABILITIES
    forward = set(inspect.signature(module.forward).parameters)
    takes = {"dtype": can.fp32_out, "save": can.saves_wy, "exchange": can.exchanges}
    assert {x for x, can_take in takes.items() if can_take} <= forward
    if hasattr(module, "backward"):
        backward = set(inspect.signature(module.backward).parameters)
        takes = {"gate_gradient": can.skips_gate_grad, "saved": can.saves_wy}
        takes["exchange"] = can.exchanges
        assert {x for x, can_take in takes.items() if can_take} <= backward


@pytest.mark.parametrize("kind", ["delta_rule", "gated"])
def test_portable_backward_after_gluon_forward(kind: str) -> None:
    def call(device: torch.device) -> None:
        terms = make(kind, (8192,), 32, device)
        save = op.Extras(save=True)
        o, _, *saved = op.forward_impl(*terms, 0.1, 64, "sm90", False, extras=save)
        assert len(saved) == len(SavedWY._fields)
        call = BackwardCall(o, None, 0.1, 64, "triton", terms.g is not None)
        grads = op.by_name(terms, True, op.backward_impl(*terms, *call, *saved))
        assert grads["q"].shape == terms.q.shape

    names = [x.name for x in trace(call, "sm_90", backward=False)]
    assert any("sm90" in x for x in names) and "delta_chunk_dstate_kernel" in names


def test_unused_slots_add_nothing_to_u_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed sequences have room for more chunks than there are, of which no scan on sm_90 writes
    how far they decay: from NaN there the gradient of u was NaN."""
    from slipstream.kernels.linear.sm90.vector_decay import backend
    from slipstream.kernels.linear.triton.vector_decay import launch

    made: list[Tensor] = []

    def launch_grads(work: object, prepared: Any, *args: object, **named: object) -> None:
        made.append(prepared.decay)

    for name in ("chunk_dqk", "chunk_fwd"):
        monkeypatch.setattr(backend, name, lambda *args, **named: None)
    monkeypatch.setattr(backend.triton, "launch_grads", launch_grads)
    monkeypatch.setattr(backend.triton, "choose_pairs", lambda work: None)
    for module, tile in ((backend.triton, "_tile"), (launch, "_chunk_tile")):
        monkeypatch.setattr(module, "family_of", lambda device: "sm_90")
        monkeypatch.setattr(module, tile, getattr(module, tile).__wrapped__)  # no CPU keeps it
    monkeypatch.setattr(backend, "gate_sums", lambda work: SimpleNamespace(z=None))
    x = torch.zeros(1, 130, 2, 128, dtype=torch.bfloat16)
    cu = torch.tensor([0, 1, 65, 130], dtype=torch.int32)
    terms = LinearInputs(x, x, x, g=x, u=torch.zeros(2, 128), cu_seqlens=cu)
    backend.backward(terms, x, None, 1.0)
    (decay,) = made
    assert decay.shape[0] == 130 // 64 + 3
    assert (decay == 1).all()


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
    from slipstream.kernels.linear.eager.recurrent_backward import recurrent_backward

    def on_device(cu: Tensor, tokens: int, chunk: int) -> ChunkMap:
        found, none = chunk_map(cu, tokens, chunk), torch.tensor([False, False])
        past = torch.full((2,), cu.shape[0] - 1)
        return found._replace(
            sequence=torch.cat([found.sequence, past]),
            first=torch.cat([found.first, none]),
            last=torch.cat([found.last, none]),
        )

    monkeypatch.setattr(recurrent, "check_cu_seqlens_values", lambda *args: None)
    x = torch.rand(1, 9, 2, 4, dtype=torch.float64)
    state = torch.rand(2, 2, 4, 4, dtype=torch.float64)
    cu = torch.tensor([0, 4, 7], dtype=torch.int32)
    terms = LinearInputs(x, x, x, beta=x[..., 0], initial_state=state, cu_seqlens=cu)
    short = terms._replace(q=x[:, :7], k=x[:, :7], v=x[:, :7], beta=x[:, :7, :, 0])
    want = recurrent.recurrent_forward(short, 0.5)
    wanted = recurrent_backward(short, x[:, :7], state, 0.5)
    monkeypatch.setattr(recurrent, "chunk_map", on_device)
    o, final = recurrent.recurrent_forward(terms, 0.5)
    assert torch.equal(o[:, :7], want[0])
    assert torch.equal(final, want[1])
    grads = recurrent_backward(terms, x, state, 0.5)
    for name, y in wanted.items():
        assert torch.equal(grads[name] if name == "initial_state" else grads[name][:, :7], y), name
