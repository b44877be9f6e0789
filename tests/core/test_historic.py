"""The failures this library was born from: the same calls, shapes and flags, and what happens here.

Kernels are compiled ahead of time for the architectures that failed; what other Triton releases do
is in core/faults.py and found by `slipstream matrix --triton`.
"""

from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.core.faults import applying, blocking
from slipstream.kernels.linear.triton.plan import HAVE_TRITON, INTERPRETED

compiles = pytest.mark.skipif(
    not HAVE_TRITON or INTERPRETED, reason="wants Triton, and its compiler"
)


def compiled(call: Any, arch: str, backward: bool = True) -> list[str]:
    """Statuses of the call's kernels, of which there is at least one."""
    from slipstream.core.matrix import judge
    from slipstream.core.trace import trace
    from slipstream.core.worker import Outcome

    jobs = trace(call, arch, backward)
    assert jobs
    return [judge(job, Outcome("ok", compiled=job.compile()))[0] for job in jobs]


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_rwkv7_packed_with_states(arch: str) -> None:
    """mma -> mma layout conversion is only supported on Ampere: abort when cu_seqlens is given."""

    def call(device: torch.device) -> Any:
        args = {x: torch.empty(1, 4096, 2, 128, device=device, dtype=torch.bfloat16) for x in NAMES}
        args["cu_seqlens"] = torch.empty(5, dtype=torch.int32, device=device)
        args["initial_state"] = torch.empty(4, 2, 128, 128, device=device)
        return ops.chunk_rwkv7(**args, output_final_state=True, impl="triton")

    assert set(compiled(call, arch)) <= {"ok", "slow"}


NAMES = ("r", "w", "k", "v", "a", "b")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
def test_retention_in_bf16_on_volta(arch: str) -> None:
    """Unsupported rounding mode for conversion: an LLVM error under Triton 3.3."""

    def call(device: torch.device) -> Any:
        q, k, v = (torch.empty(2, 256, 4, 64, device=device, dtype=torch.bfloat16) for _ in "qkv")
        return ops.chunk_retention(q, k, v, impl="triton")

    assert set(compiled(call, arch, backward=False)) == {"slow"}  # FMA units, and right


@pytest.mark.parametrize("arch", ["sm_70", "sm_75"])
@pytest.mark.parametrize("release", ["3.3.0", "3.3.1"])
def test_the_plan_knows_what_triton_3_3_cannot_do(release: str, arch: str) -> None:
    fault = blocking(arch, release, "12.4.127", {"dot16"})
    assert fault is not None and "float32" in fault.way_out


@compiles
def test_what_triton_3_3_cannot_do_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention and attention in 16 bits: no product of 16-bit operands reaches the compiler."""
    from slipstream.core import trace as tracing
    from slipstream.core.machine import Machine

    old = Machine("sm_75", "3.3.1", "12.4.127", passive=True, remembers=False)
    monkeypatch.setattr(tracing, "elsewhere", lambda arch, remembers: old)
    for operator, dtype in (
        (ops.chunk_retention, torch.bfloat16),
        (ops.attention, torch.float16),
    ):

        def call(device: torch.device, operator: Any = operator, dtype: Any = dtype) -> Any:
            q, k, v = (torch.empty(2, 64, 2, 64, device=device, dtype=dtype) for _ in "qkv")
            return operator(q, k, v, impl="triton")

        jobs = tracing.trace(call, "sm_75")
        assert jobs and all(set(job.tensors.values()) == {"*fp32"} for job in jobs)


@compiles
def test_fp32_product_of_128_x_32_x_32_by_descriptors() -> None:
    """WGMMA type or shape is not supported: an abort under Triton 3.2, known as such."""
    from slipstream.core.aot import compile_kernel

    got = compile_kernel(
        "tests.core.planted:descriptor_product_kernel",
        {"x_desc": "tensordesc<fp32[128, 32]>", "y_desc": "tensordesc<fp32[32, 32]>"}
        | {"o_ptr": "*fp32"},
        {},
        target="sm_90",
    )
    assert got.instructions["tma"] > 0 and got.instructions["wgmma"] > 0
    assert "wgmma-fp32-shape" in {x.name for x in applying("sm_90", "3.2.0")}


@compiles
@pytest.mark.parametrize(("K", "V"), [(128, 64), (64, 128)])
def test_attention_with_keys_and_values_of_different_widths(K: int, V: int) -> None:
    """An sm_90 attention kernel that did not compile."""

    def call(device: torch.device) -> Any:
        q, k, v = (
            torch.empty(2, 256, 4, width, device=device, dtype=torch.bfloat16)
            for width in (K, K, V)
        )
        return ops.attention(q, k, v)

    assert set(compiled(call, "sm_90", backward=False)) <= {"ok", "slow"}


def test_token_ids_beyond_the_vocabulary() -> None:
    """A device-side assert far from its cause: here a ValueError that names the id."""
    from slipstream.models import SlipstreamConfig, SlipstreamForCausalLM

    config = SlipstreamConfig(vocab_size=50, hidden_size=32, num_heads=2, mixers=["retention"])
    ids = torch.randint(50, 150, (1, 8))
    with pytest.raises(ValueError, match=r"id \d+ at position .* outside the vocabulary of 50"):
        SlipstreamForCausalLM(config)(ids)
