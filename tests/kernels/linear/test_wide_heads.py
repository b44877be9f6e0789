"""Heads of more than 256 channels are split into such as kernels take, and nothing else changes."""

import pytest
import torch

from slipstream import ops
from slipstream.compiler.aot import Job
from slipstream.compiler.arch import ARCHS
from slipstream.compiler.trace import PlainTorch, trace
from slipstream.kernels.linear.inputs import DIFFERENTIABLE, LinearInputs
from slipstream.kernels.linear.modes import wide_heads
from slipstream.kernels.linear.modes.wide_heads import HeadGroups, groups_of, shapes_of_split
from slipstream.kernels.linear.reference import linear_reference
from slipstream.runtime.call_replay import record_decision
from slipstream.tools.catalog import Shape, chosen, flat
from tests.support import wants
from tests.support.interpreted import interpreted
from tests.support.operators import Size, cast, offsets, packed, relative_error, with_grads

B, T, H, HV, N = 1, 23, 2, 4, 3
LENGTHS = (9, 0, 14)
# V, and the groups of columns and how wide one is
WIDTHS = {256: (1, 256), 257: (2, 144), 300: (2, 160), 384: (3, 128), 512: (2, 256), 1000: (4, 256)}
# terms besides q, k and v
KINDS = {
    "none": (),
    "scalar": ("g",),
    "channel": ("gk", "u"),
    "values": ("gv",),
    "both": ("gk", "gv"),
    "delta": ("g", "beta"),
    "comba": ("g", "beta", "p"),
    "kda": ("gk", "beta"),
    "by column": ("g", "beta wide"),
    "dplr": ("gk", "a", "b"),
}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def make(kind: str, K: int, V: int) -> LinearInputs:
    makers = {
        "g": lambda: -randn(B, T, HV).abs(),
        "gk": lambda: -randn(B, T, HV, K).abs(),
        "gv": lambda: -randn(B, T, HV, V).abs(),
        "beta": lambda: randn(B, T, HV).sigmoid(),
        "beta wide": lambda: randn(B, T, HV, V).sigmoid(),
        "u": lambda: randn(HV, K),
        **{x: lambda: randn(B, T, H, K) / K**0.5 for x in "qkpab"},
    }
    names = {"gk": "g", "beta wide": "beta"}
    given = {names.get(x, x): makers[x]() for x in ("q", "k", *KINDS[kind])}
    return LinearInputs(
        **given, v=randn(B, T, HV, V), initial_state=randn(N, HV, K, V), cu_seqlens=offsets(LENGTHS)
    )


def differentiable(terms: LinearInputs) -> LinearInputs:
    given = {name: getattr(terms, name) for name in DIFFERENTIABLE}
    leaves = {name: x.clone().requires_grad_() for name, x in given.items() if x is not None}
    return terms._replace(**leaves)


@pytest.mark.parametrize("width", WIDTHS)
def test_wide_heads_are_cut(width: int) -> None:
    groups = groups_of(make("delta", 16, width))
    assert (groups.columns, groups.V) == WIDTHS[width]
    assert groups.rows == 1
    assert groups_of(make("none", width, 16))[:2] == WIDTHS[width]
    assert groups_of(make("dplr", width, 16)).rows == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("K", "V"), [(8, 300), (8, 512), (300, 520)], ids=str)
def test_split_heads_give_the_same_numbers_and_gradients(kind: str, K: int, V: int) -> None:
    terms = make(kind, K, V)
    check_split(terms, groups_of(terms), 3 if V == 520 else 2)


@pytest.mark.parametrize("kind", ["none", "scalar"])
def test_heads_split_by_another_width_give_the_same_numbers(kind: str) -> None:
    terms = make(kind, 8, 24)
    check_split(terms, groups_of(terms, 8), 3)


def check_split(terms: LinearInputs, groups: HeadGroups, columns: int) -> None:
    assert groups.columns == columns
    whole, parts = differentiable(terms), differentiable(terms)
    split = wide_heads.split_heads(parts, groups)
    for x, y in zip(split, shapes_of_split(terms, groups), strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or (x.shape, x.dtype) == (y.shape, y.dtype)
    _, record = record_decision(lambda: shapes_of_split(terms, groups).v.shape[2], terms)
    assert record is not None  # a plan is not asked for again for each size
    want = linear_reference(whole, 0.3)
    got = wide_heads.join_heads(*linear_reference(split, 0.3), parts, groups)
    weights = [torch.randn_like(x) for x in want]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
        assert x.is_contiguous()
    inputs = [(x, y) for x, y in zip(parts, whole) if x is not None and x.requires_grad]
    found = torch.autograd.grad(got, [x for x, _ in inputs], weights)
    wanted = torch.autograd.grad(want, [y for _, y in inputs], weights)
    torch.testing.assert_close(found, wanted)


CHUNKS = ("retention", "gla", "gsa", "gated_delta_rule", "kda", "comba", "rwkv7")


def compiled(name: str, K: int, V: int, arch: str, impl: str | None = None) -> set[str]:
    sample, *_ = chosen([name])
    shape = Shape(T=100, H=2, K=K, V=V, state=True)
    jobs = trace(lambda device: sample.call(sample.inputs(shape, device), impl), arch)
    return {job.name for job in jobs}


@wants.triton
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", [*CHUNKS, "gated_delta_product"])
def test_kernels_take_values_of_512_channels(name: str, arch: str) -> None:
    found = compiled(f"chunk_{name}", 128, 512, arch)
    assert found
    takes = "gated" in name or name == "retention"
    assert any("sm90" in x for x in found) == (arch == "sm_90" and takes)


@wants.triton
@pytest.mark.parametrize(
    ("K", "V", "takes"), [(128, 256, True), (128, 384, True), (128, 192, False), (256, 256, False)]
)
@pytest.mark.parametrize("name", ["retention", "simple_gla"])
def test_columns_are_split_where_sm90_then_takes_them(
    name: str, K: int, V: int, takes: bool
) -> None:
    found = compiled(f"chunk_{name}", K, V, "sm_90")
    # forward of 256 channels needs no splitting
    assert ("scalar_decay_chunk_fwd_sm90_kernel" in found) == (takes or K == 256)
    assert ("scalar_decay_chunk_bwd_sm90_kernel" in found) == takes


@wants.triton
@pytest.mark.parametrize("name", CHUNKS)
def test_additive_kernels_take_512_channels(name: str) -> None:
    erases = name not in ("retention", "gla", "gsa")
    if not erases:
        assert compiled(f"chunk_{name}", 512, 128, "sm_90")
        return
    with pytest.raises(PlainTorch):
        compiled(f"chunk_{name}", 512, 128, "sm_90")
    with pytest.raises(NotImplementedError, match="K of a recurrence that erases may be at most"):
        compiled(f"chunk_{name}", 512, 128, "sm_90", impl="triton")


def step_jobs(K: int, V: int, impl: str | None = None) -> list[Job]:
    def call(device: torch.device) -> None:
        q = torch.empty(2, 1, 1, K, device=device)
        state = torch.empty(2, 2, K, V, device=device)
        v, beta = state[:, None, :, 0], torch.empty(2, 1, 2, device=device)
        ops.recurrent_step(q, q, v, beta=beta, state=state, impl=impl)

    return trace(call, "sm_90", backward=False)


@wants.triton
@pytest.mark.parametrize(("K", "V"), [(128, 2000), (300, 64), (1024, 64)], ids=str)
def test_step_kernel_takes_any_value_width(K: int, V: int) -> None:
    (job,) = step_jobs(K, V)
    assert job.name == "linear_decode_kernel"
    assert job.compile().shared <= ARCHS["sm_90"].shared


@wants.triton
def test_step_of_wide_keys_is_plain_torch() -> None:
    with pytest.raises(NotImplementedError, match="K may be at most 1024"):
        step_jobs(1025, 64, "triton")


def check(name: str, size: Size) -> None:
    op, *_ = chosen([f"chunk_{name}"])
    args = op.inputs(size)
    want = with_grads(lambda x: flat(op(x, impl="reference")), cast(args, torch.float64))
    got = with_grads(lambda x: flat(op(x, impl="triton")), args)
    for found, wanted in zip(got, want, strict=True):
        for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
            error = relative_error(x, y)
            assert error <= 1e-5, f"{name}, {size}: {i} is off by {error:.1e}"


def check_step(K: int, V: int) -> None:
    q, k = torch.randn(2, 1, 1, K), torch.randn(2, 1, 1, K) / K**0.5
    v, state = torch.randn(2, 1, 2, V), torch.randn(2, 2, K, V)
    given = {"g": -torch.rand(2, 1, 2), "beta": torch.rand(2, 1, 2)}
    want, final = ops.fused_recurrent_gated_delta_rule(
        q, k, v, **given, initial_state=state, output_final_state=True, impl="reference"
    )
    got = ops.recurrent_step(q, k, v, **given, state=state, impl="triton")
    assert relative_error(got, want) <= 1e-5
    assert relative_error(state, final) <= 1e-5


@interpreted
def test_wide_heads_match_reference_when_interpreted() -> None:
    small = Size(B=1, T=20, H=1, HV=2, K=16, V=300)
    check("retention", small)
    check("gated_delta_rule", packed(small, 3, 0, 17))
    check("kda", small)
    check("simple_gla", Size(B=1, T=20, H=1, HV=2, K=300, V=16))
    check_step(20, 300)
    check_step(300, 12)
