"""Compiling for a GPU that is not there makes what the JIT makes there."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.compiler import aot
from slipstream.compiler.aot import common_options, compile_kernel, gpu_target, load
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
