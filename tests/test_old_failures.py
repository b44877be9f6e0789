"""Calls of the kinds that this library was born from: each runs, or says why it does not.

What needs a device is in gpu/test_wrong_indices.py; here kernels are compiled ahead of time, and
the same calls run on the CPU. `tools/matrix.py --triton` compiles them under other releases.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import layers, ops
from slipstream.runtime import guarded_launch
from slipstream.runtime import token_ids as watched
from slipstream.runtime.backends import HAVE_TRITON, INTERPRETED
from tests.support.old_failures import RWKV7, WIDTHS, rwkv7_inputs
from tests.support.operators import relative_error
from tests.support.planted_fault import FAULT, plant
from tests.support.scripts import script

compiles = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)
slow = pytest.mark.slow
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


def statuses(call: Any, arch: str, backward: bool = True) -> Counter:
    """The matrix's statuses of the call's kernels, of which there is at least one."""
    from slipstream.compiler.compile_worker import Outcome
    from slipstream.compiler.support_matrix import judge
    from slipstream.compiler.trace import trace

    jobs = trace(call, arch, backward)
    assert jobs
    return Counter(judge(job, Outcome("ok", compiled=job.compile()))[0] for job in jobs)


@pytest.mark.parametrize("T", [133, pytest.param(4096, marks=slow)])
def test_rwkv7_packed_with_states_runs(T: int) -> None:
    given = rwkv7_inputs(T)
    o, state = ops.chunk_rwkv7(**given, output_final_state=True)
    assert o.dtype == torch.bfloat16 and o.shape == (1, T, 2, 128)
    assert state is not None and state.shape == (4, 2, 128, 128)
    wide = {n: x.double() if x.is_floating_point() else x for n, x in given.items()}
    want, want_state = ops.fused_recurrent_rwkv7(**wide, output_final_state=True)
    assert relative_error(o, want) < 0.006
    assert relative_error(state, want_state) < 0.006


@compiles
@slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_rwkv7_packed_with_states_compiles(arch: str) -> None:
    """B 1, T 4096, H 2, D 128 in bfloat16, gradients too."""

    def call(device: torch.device) -> Any:
        args = {x: torch.empty(1, 4096, 2, 128, device=device, dtype=torch.bfloat16) for x in RWKV7}
        args["cu_seqlens"] = torch.empty(5, dtype=torch.int32, device=device)
        args["initial_state"] = torch.empty(4, 2, 128, 128, device=device)
        return ops.chunk_rwkv7(**args, output_final_state=True, impl="triton")

    assert set(statuses(call, arch)) <= {"ok", "slow"}


def retention_on(device: torch.device) -> Tensor:
    """The layer's forward on a device that is not there."""
    layer = RETENTION
    empty = {
        name: torch.empty(x.shape, device=device, dtype=torch.bfloat16)
        for name, x in (*layer.named_parameters(), *layer.named_buffers())
    }
    x = torch.empty(1, 96, 128, device=device, dtype=torch.bfloat16)
    return torch.func.functional_call(layer, empty, (x,))[0]


RETENTION = layers.MultiScaleRetention(128, 2)


def test_retention_layer_runs_in_bf16() -> None:
    layer = layers.MultiScaleRetention(128, 2)
    x = torch.randn(2, 96, 128)
    want = layer(x)[0]
    got = layer.to(torch.bfloat16)(x.bfloat16())[0]
    assert got.dtype == torch.bfloat16 and relative_error(got, want) < 0.03


@compiles
@pytest.mark.parametrize("arch", ["sm_70", pytest.param("sm_75", marks=slow)])
def test_retention_layer_in_bf16_compiles_for_volta(arch: str) -> None:
    """Whose tensor cores do not know bfloat16."""
    assert set(statuses(retention_on, arch, backward=False)) <= {"ok", "slow"}


def test_recorded_releases_have_retention_on_volta() -> None:
    """docs/SUPPORT.md has what docs/support.json says, of all architectures; none dies there."""
    from slipstream.compiler.arch import ARCHS

    root = Path(__file__).parents[1]
    recorded = script("tools/support_page").read(root / "docs/support.json")
    table = (root / "docs/SUPPORT.md").read_text()
    assert set(re.findall(r"^## Triton (\S+)", table, re.M)) == set(recorded)
    (made,) = re.findall(r"^RELEASES\W+(.+)$", (root / "Makefile").read_text(), re.M)
    assert set(re.findall(r"[\d.]+", made)) <= set(recorded)
    for release, archs in recorded.items():
        assert release in RELEASES and set(archs) == set(ARCHS), release
        status, why = archs["sm_70"]["operators"]["chunk_retention"]
        assert status in ("ok", "slow") or (status in ("torch", "refused") and why), release


@compiles
@pytest.mark.parametrize("triton", ["3.6.0", "3.8.0"])
def test_attention_avoids_a_fault_of_its_products(
    triton: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the table has one: a reason, in place of a compiler that ends the process."""
    from slipstream.compiler.trace import trace

    def call(device: torch.device) -> Any:
        q, k, v = (torch.empty(2, 64, 2, 64, device=device, dtype=torch.float16) for _ in "qkv")
        return ops.attention(q, k, v, impl="triton")

    plant(monkeypatch)
    compilers = {"triton": triton, "ptxas": "12.8.93", "ptxas_blackwell": "12.8.93"}
    if triton == "3.8.0":  # after the fault
        assert trace(call, "sm_75", compilers=compilers)
        return
    with pytest.raises(NotImplementedError, match=f"{FAULT.name}; {FAULT.way_out}"):
        trace(call, "sm_75", compilers=compilers)


@pytest.mark.parametrize(("K", "V"), WIDTHS)
def test_attention_of_two_widths_runs(K: int, V: int) -> None:
    q, k, v = (torch.randn(1, 70, 2, width, dtype=torch.float64) for width in (K, K, V))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = ops.attention(*inputs)
    want, _ = ops.attention(*inputs, return_lse=True, impl="reference")
    torch.testing.assert_close(o, want)
    weight = torch.randn_like(o)
    for x, y in zip(*(torch.autograd.grad(y, inputs, weight) for y in (o, want))):
        torch.testing.assert_close(x, y)


@compiles
@pytest.mark.parametrize(
    ("K", "V", "backward"),
    [(128, 64, False), *(pytest.param(*x, True, marks=slow) for x in WIDTHS)],
)
def test_attention_of_two_widths_compiles(K: int, V: int, backward: bool) -> None:
    def call(device: torch.device) -> Any:
        q, k, v = (
            torch.empty(2, 256, 4, width, device=device, dtype=torch.bfloat16)
            for width in (K, K, V)
        )
        return ops.attention(q, k, v)

    assert set(statuses(call, "sm_90", backward)) <= {"ok", "slow"}


@pytest.mark.parametrize("mixer", ["retention", "attention"])
def test_token_ids_beyond_the_vocabulary(mixer: str) -> None:
    """A device-side assert far from its cause, in an RMSNorm: here an error that names the id."""
    pytest.importorskip("transformers")
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    config = SlipstreamConfig(vocab_size=50, hidden_size=32, num_heads=2, mixers=[mixer])
    model = SlipstreamForCausalLM(config)
    ids = torch.randint(0, 50, (2, 8))
    ids[1, 3] = 149
    with pytest.raises(
        ValueError, match=r"input_ids: id 149 at position \(1, 3\) .* vocabulary of 50"
    ):
        model(ids)
    ids = torch.randint(50, 150, (1, 8))
    with pytest.raises(ValueError, match=r"id \d+ at position \(0, 0\) .* vocabulary of 50"):
        model(ids, labels=ids)


def test_pending_error_raises_at_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a kernel leaves position + 1, id, size, last length and the name's number."""
    monkeypatch.setattr(watched, "_watches", [])
    monkeypatch.setattr(watched, "_by_index", {})
    slots = watched.slots_for(torch.zeros(1, dtype=torch.long))
    slots[:6] = torch.tensor([1, 3 + 1, 149, 50, 2, 0])
    guard = guarded_launch.Guard("triton", torch.device("cpu"), lambda: ("norm.triton",))
    with pytest.raises(ValueError, match=r"input_ids: id 149 at position \(1, 1\) .* of 50"):
        guard.__enter__()
    with guard as usable:
        assert usable
