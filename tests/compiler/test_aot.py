"""Compiling for a GPU that is not there makes what the JIT makes there; kernels of a call, found
out on such a device, are those the JIT would compile."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import ops
from slipstream.compiler import aot
from slipstream.compiler import trace as tracing
from slipstream.compiler.aot import common_options, compile_kernel, gpu_target, load
from slipstream.compiler.trace import trace
from slipstream.tools.catalog import SAMPLES, Sample, Shape
from tests.support import wants
from tests.support.drivers import Driver

pytestmark = wants.compiler

PRODUCT = "tests.support.planted_bugs:product_kernel"
TENSORS = {f"{x}_ptr": "*bf16" for x in "xyo"}

CONSTANTS = {"N": 64, "PRECISION": "tf32"}


@pytest.mark.parametrize("bias", [False, True])
def test_compile_kernel_makes_what_the_jit_makes(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    """The same place in Triton's cache: a first call after it compiles nothing."""
    from triton.runtime import driver

    tensors = TENSORS | ({"bias_ptr": "*fp32"} if bias else {})
    ours = compile_kernel(PRODUCT, tensors, CONSTANTS)
    monkeypatch.setattr(driver, "_active", Driver())
    arguments = [torch.bfloat16] * 3 + [torch.float32 if bias else None]
    theirs = load(PRODUCT).warmup(
        *arguments,
        1.0,
        50,
        **CONSTANTS,
        **common_options(gpu_target("sm_90")),
        num_warps=4,
        num_stages=3,
        grid=(1,),
    )
    assert theirs.hash == ours.hash


def test_cache_has_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel whose name is longer than a file's, too."""
    name = "k" * 160
    text = f"import triton\n\n\n@triton.jit\ndef {name}(x_ptr):\n    pass\n"
    (tmp_path / "of_a_long_name.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    long = f"of_a_long_name:{name}", {"x_ptr": "*fp32"}, {}
    for kernel, tensors, constants in ((PRODUCT, TENSORS, CONSTANTS), long):
        jobs = [aot.Job(kernel, tensors, constants, {}, n, 3, {}, "sm_90") for n in (4, 8)]
        assert not aot.cached(jobs[0])
        jobs[0].compile()
        assert [aot.cached(job) for job in jobs] == [True, False]
        with monkeypatch.context() as without:
            without.delattr("triton.runtime.cache.get_cache_key")
            assert not aot.cached(jobs[0])


def test_registers_are_allocated_at_the_assemblers_own_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For sm_90 from Triton 3.9 on, which asks for a lower one, unless the user says a level."""

    def given(arch: str, *release: int) -> str | None:
        monkeypatch.setattr(aot, "_release", lambda: release)
        return aot.common_options(aot.gpu_target(arch)).get("ptx_options")

    monkeypatch.delenv("PTXAS_OPTIONS", raising=False)
    level = "--regAllocOptLevel=4"
    found = [given("sm_90", 3, x) for x in (6, 8, 9, 10)]
    assert found == [None, None, level, level]
    assert {given(x, 3, 9) for x in ("sm_80", "sm_100", "gfx942")} == {None}
    given("sm_90", 3, 9)
    assert aot.compile_kernel(PRODUCT, TENSORS, CONSTANTS).registers > 0  # ptxas takes it
    monkeypatch.setenv("PTXAS_OPTIONS", "--regAllocOptLevel=2")
    assert given("sm_90", 3, 9) is None


@pytest.mark.parametrize(
    ("target", "instruction"),
    [("sm_75", "fma"), ("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("gfx942", "mfma")],
)
def test_compile_kernel_says_what_it_takes(target: str, instruction: str) -> None:
    got = compile_kernel(PRODUCT, TENSORS, {"N": 64, "PRECISION": "ieee"}, target=target)
    assert got.instructions[instruction] > 0 and got.dots == 1
    assert got.registers > 16 and got.shared > 0 and got.seconds > 0
    assert got.stack == 0 or target == "sm_75"
    others = {"wgmma", "mma.sync", "mfma", "tcgen05"} - {instruction}
    assert not any(got.instructions[x] for x in others)
    assert ("wgmma.mma_async" in got.text) == (target == "sm_90")


def test_compile_kernel_names_what_it_was_not_given() -> None:
    with pytest.raises(ValueError, match="product_kernel: constexpr N has neither value"):
        compile_kernel(PRODUCT, TENSORS, {})
    with pytest.raises(ValueError, match="product_kernel: has no parameter WIDTH, z_ptr"):
        compile_kernel(PRODUCT, {"z_ptr": "*bf16"}, {"WIDTH": 1})


@pytest.mark.parametrize("first", ["trap;", "mov.u32 %r1, %tid.x;"])
def test_code_that_only_traps_is_refused(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Triton returns such code where tensor memory does not do: here it is put into a sound
    kernel's."""
    import triton

    compile_soundly = triton.compile

    def compile_changed(*args: Any, **options: Any) -> Any:
        made = compile_soundly(*args, **options)
        asm = {name: made.asm[name] for name in made.asm}
        asm["ptx"], changed = re.subn(r"(?m)^(// %bb\.0:.*\n)", rf"\1\t{first}\n", asm["ptx"])
        assert changed == 1
        return SimpleNamespace(asm=asm, metadata=made.metadata, hash=made.hash)

    monkeypatch.setattr(triton, "compile", compile_changed)
    if first != "trap;":
        assert compile_kernel(PRODUCT, TENSORS, CONSTANTS, target="sm_100").dots == 1
        return
    with pytest.raises(RuntimeError, match="product_kernel: out of tensor memory"):
        compile_kernel(PRODUCT, TENSORS, CONSTANTS, target="sm_100")


def gated_delta_rule(device: torch.device, T: int = 100, impl: str = "triton") -> Any:
    q, k, v = (torch.empty(2, T, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    g, beta = (torch.empty(2, T, 4, device=device) for _ in range(2))
    return ops.chunk_gated_delta_rule(q, k, v, g, beta, impl=impl)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_trace_finds_what_the_jit_would_compile(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Forward and backward; the same source, hence the same place in Triton's cache."""
    from triton.compiler import ASTSource

    told: dict[str, dict] = {}
    make = aot.job_of

    def note(module: str, name: str, compile: dict, arch: str) -> aot.Job:
        job = make(module, name, compile, arch)
        told.setdefault(job.key, compile)
        return job

    monkeypatch.setattr(aot, "job_of", note)
    jobs = tracing.trace(gated_delta_rule, arch)
    assert {"delta_chunk_fwd_kernel", "delta_dqkg_kernel"} <= {x.name for x in jobs}
    assert [x.key for x in jobs] == list(told)
    assert {x.arch for x in jobs} == {arch}
    for job, compile in zip(jobs, told.values()):
        fn = aot.load(job.kernel)
        want = ASTSource(fn, compile["signature"], compile["constants"], compile["configs"][0])
        assert aot.source_of(job).hash() == want.hash(), job.name


def test_cached_says_whether_a_first_call_would_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    job = aot.Job(
        "tests.support.planted_bugs:planted_kernel",
        {"x_ptr": "*i32"},
        {"WHAT": "x"},
        {},
        1,
        1,
        {},
        "sm_80",
    )
    assert not aot.cached(job)
    job.compile()
    assert aot.cached(job)
    assert not aot.cached(replace(job, warps=2))


# for sm_90, with a Triton whose Gluon is another
portable = pytest.mark.filterwarnings(
    "ignore::slipstream.compiler.compiler_state.KernelDisabledWarning"
)


@portable
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_trace_of_no_sequences(arch: str) -> None:
    """Every chunked operator: how many programs there are divides nothing."""

    def call(device: torch.device, sample: Sample) -> Any:
        return sample.call(sample.inputs(Shape(B=0), device, blank=True))

    chunked = [x for x in SAMPLES if x.op.startswith("chunk_")]
    assert len(chunked) > 15
    for sample in chunked:
        trace(partial(call, sample=sample), arch)


@portable
@pytest.mark.parametrize("H", [1, 2])
def test_trace_copies_strided_state(H: int) -> None:
    def call(device: torch.device) -> Any:
        q, k, v = (torch.empty(1, 64, H, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        state = [torch.empty(1, n, H, 64, device=device) for n in (64, 1)]
        kv = state[0].transpose(1, 2)
        return ops.chunk_linear_attn(q, k, v, initial_state=(kv, state[1]))

    assert trace(call, "sm_90", backward=False)
