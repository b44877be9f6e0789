"""The Triton kernels compiled for GPUs that need not be there: shared memory, tensor cores, spills.

The calls themselves are traced, so tiles and arguments are those of a real launch.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.compiler.arch import ARCHS
from slipstream.kernels.attention.cache import Cache
from slipstream.kernels.attention.inputs import AttentionInputs, AttentionOptions
from slipstream.kernels.attention.triton.plan import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

WITH_DOTS = ("softmax_queries", "softmax_dkv", "softmax_decode")
# bytes of stack a thread at 16 bits: pointers, mostly outside of the inner loops; the widest
# heads' dk and dv take the registers
SPILLS = {64: 256, 128: 256, 256: 768}


def attention_call(D: int, DV: int, dtype: torch.dtype, full: bool) -> Any:
    """Causal alone, or with every feature that has a flag."""

    def call(device: torch.device) -> None:
        from slipstream.kernels.attention.triton import launch

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        options = AttentionOptions(0.1, 100, 0, 5.0) if full else AttentionOptions(0.1, -1, 0)
        terms = AttentionInputs(make(1, 500, 4, D), make(1, 500, 2, D), make(1, 500, 2, DV))
        if full:
            cu = make(4, dtype=torch.int32)
            wide = {"dtype": torch.float32}
            terms = AttentionInputs(
                *terms[:3],
                make(1, 500, 4, **wide),
                make(4, **wide),
                make(3, 4, **wide),
                cu,
                cu,
                make(3, dtype=torch.int64),
            )
        o, lse = launch.forward(terms, options)
        launch.backward(terms, options, o, lse, torch.empty_like(o), torch.empty_like(lse))

    return call


def decode_call(D: int, dtype: torch.dtype, page: int) -> Any:
    def call(device: torch.device) -> None:
        from slipstream.kernels.attention.triton import decode_launch

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        table = make(2, 40, dtype=torch.int32) if page else None
        k = make(90, page, 2, D) if page else make(2, 3000, 2, D)
        lengths = make(2, dtype=torch.int32)
        cache = Cache(make(2, 1, 8, D), k, k, lengths, table=table)
        decode_launch.decode(cache, AttentionOptions(0.1, -1, 0))
        new = make(2, 1, 2, D)
        decode_launch.append(k, k, new, new, lengths, None, table)

    return call


def check(arch: str, call: Any, spills: int | None) -> None:
    from slipstream.compiler.trace import trace

    jobs = trace(call, arch, backward=False)
    assert jobs
    for job in jobs:
        got = job.compile()
        assert got.shared <= ARCHS[arch].shared, job.name
        if job.name.startswith(WITH_DOTS):
            wanted = [ARCHS[arch].instruction or "fma"]
            if arch == "sm_100" and job.name in ("softmax_queries_kernel", "softmax_dkv_kernel"):
                wanted.append("mma.sync")  # of the widest heads, by tiles of 32 rows
            assert any(got.instructions[x] for x in wanted), job.name
            if arch == "sm_90":  # what narrow tiles fall back to
                assert not got.instructions["mma.sync"], job.name
        assert not got.instructions["atomic"], job.name
        if spills is not None:
            assert got.stack <= spills, f"{job.name}: {got.stack} bytes spilled"


def variants() -> Iterator[Any]:
    """The widest head is slow to compile, and so is float32."""
    for arch in ("sm_90", "sm_80"):
        for D in (64, 128, 256):
            for dtype in (torch.bfloat16, torch.float32):
                if dtype == torch.float32 and D == 256:
                    continue  # refused on sm_90
                quick = arch == "sm_90" and D == 128 and dtype == torch.bfloat16
                name = f"{arch}-{D}-{str(dtype)[6:]}"
                marks = () if quick else (pytest.mark.slow,)
                yield pytest.param(arch, D, dtype, id=name, marks=marks)
    for D in (64, 128):  # as much as tensor memory holds
        name = f"sm_100-{D}-float32"
        yield pytest.param("sm_100", D, torch.float32, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("arch", "D", "dtype"), list(variants()))
def test_attention_compiles(arch: str, D: int, dtype: torch.dtype) -> None:
    spills = SPILLS[D] if dtype == torch.bfloat16 else None
    check(arch, attention_call(D, D, dtype, full=False), spills)


@pytest.mark.slow
def test_float32_with_everything_fits_tensor_memory() -> None:
    check("sm_100", attention_call(128, 128, torch.float32, full=True), None)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(("D", "DV"), [(96, 64), (192, 128)])
def test_attention_with_everything_compiles(arch: str, D: int, DV: int) -> None:
    check(arch, attention_call(D, DV, torch.float16, full=True), None)


def rounded_call(D: int, dtype: torch.dtype, page: int) -> Any:
    def call(device: torch.device) -> None:
        from slipstream.kernels.attention.triton import decode_launch

        def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        table = make(2, 40, dtype=torch.int32) if page else None
        shape = (90, page, 2) if page else (2, 3000, 2)
        k, scale = make(*shape, D), make(*shape, dtype=torch.float32)
        q, lengths = make(2, 1, 8, D, dtype=torch.bfloat16), make(2, dtype=torch.int32)
        cache = Cache(q, k, k, lengths, table=table, k_scale=scale, v_scale=scale)
        decode_launch.decode(cache, AttentionOptions(0.1, -1, 0))

    return call


@pytest.mark.parametrize(
    ("arch", "D", "page"), [("sm_90", 64, 0), ("sm_90", 128, 128), ("sm_80", 128, 30)]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_decoding_from_8_bits_compiles(arch: str, D: int, page: int, dtype: torch.dtype) -> None:
    """By few instructions a key: most of what was once converted by the compiler (decode.py)."""
    from slipstream.compiler.trace import trace

    job, *_ = trace(rounded_call(D, dtype, page), arch, backward=False)
    got = job.compile()
    assert job.name == "softmax_decode_kernel"
    assert got.shared <= ARCHS[arch].shared and got.stack == 0
    assert got.instructions["mma.sync"] and not got.instructions["wgmma"]
    assert "cvt.rn.bf16" not in got.ptx  # nothing is converted by way of float32


@pytest.mark.parametrize(("arch", "D"), [("sm_80", 16), ("sm_120", 32)])
def test_decoding_from_narrow_heads_of_8_bits_compiles(arch: str, D: int) -> None:
    """A product takes a quarter of the channels, and at least 16."""
    from slipstream.compiler.trace import trace

    job, *_ = trace(rounded_call(D, torch.int8, 0), arch, backward=False)
    got = job.compile()
    assert job.name == "softmax_decode_kernel"
    assert got.shared <= ARCHS[arch].shared and got.stack <= SPILLS[64]
    assert got.instructions["mma.sync"]


@pytest.mark.parametrize(("D", "page"), [(64, 0), (62, 30)], ids=["words", "bytes"])
def test_decoding_from_8_bits_compiles_for_amd(D: int, page: int) -> None:
    """Whose compiler reshapes no pointers."""
    from slipstream.compiler.trace import trace

    job, *_ = trace(rounded_call(D, torch.int8, page), "gfx942", backward=False)
    assert job.compile().shared <= ARCHS["gfx942"].shared


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_decoding_from_wide_heads_of_8_bits_compiles(dtype: torch.dtype) -> None:
    from slipstream.compiler.trace import trace

    for arch in ("sm_75", "sm_90", "sm_100"):
        job, *_ = trace(rounded_call(256, dtype, 0), arch, backward=False)
        assert job.compile().shared <= ARCHS[arch].shared, arch


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("page", [0, 128, 30])
def test_decoding_compiles(arch: str, page: int) -> None:
    check(arch, decode_call(128, torch.bfloat16, page), 0)
