"""Under Triton's interpreter: the past keeps its bits when the future changes
(tests/ops/test_properties.py has the same of plain torch), and states that kernels leave on their
way, whole and in segments; also with small inputs where halves or quarters of a chunk are apart.
The interpreter has no bfloat16, which alone takes chunks so. float32 has its exponents, and is
given its limits here, and at last operands of products are rounded as bfloat16."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import ops
from tests.support.causality import changed_bits
from tests.support.interpreted import PARTS, interpreted
from tests.support.operators import LINEAR, Size
from tests.support.prefix_states import OPERATORS, Call, expect_prefix_states

# one of each kernel; the others, and gates that grow weaker, are further
SAMPLE = ("chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_comba", "chunk_kda")
SIZE = Size(B=1, T=40, H=1, HV=1, K=16, V=16)


def check(part: str) -> None:
    for op in LINEAR:
        if "chunk_" not in op.name or (part == "sample") != (op.name in SAMPLE):
            continue
        gates = (("weak", "strong"), ("strong", "weak"), ("mixed", "mixed"))
        found = changed_bits(op, "triton", SIZE, (5, 21), gates[: 1 if part == "sample" else 3])
        assert not found, f"{op.name}: {found}"


def check_apart() -> None:
    """With halves of chunks apart, as bfloat16 has them, and exp2 as a GPU has it, whose last bits
    are others below 0: float32 shows every one of them."""
    from triton.runtime.interpreter import InterpreterBuilder

    from slipstream.kernels.linear.triton.dplr import tiles
    from slipstream.kernels.linear.triton.vector_decay import backend

    def exp2(x: np.ndarray) -> np.ndarray:
        y = np.exp2(x)
        return np.where((x < 0) & (x != np.floor(x)), np.nextafter(y, np.float32(np.inf)), y)

    def create_exp2(self: InterpreterBuilder, arg: object) -> object:
        return self.unary_op(arg, exp2)

    with (
        mock.patch.object(InterpreterBuilder, "create_exp2", create_exp2),
        mock.patch.dict(
            tiles.RANGES, {torch.float32: tiles.RANGES[torch.float32]._replace(apart=11.0)}
        ),
        mock.patch.dict(backend.RANGES, {torch.float32: backend.RANGES[torch.bfloat16]}),
    ):
        for op in LINEAR:
            if op.name in ("chunk_kda", "chunk_dplr_delta_rule", "chunk_gla", "chunk_rwkv6"):
                gates = (("weak", "strong"), ("strong", "weak"))
                found = changed_bits(op, "triton", SIZE, (2, 10, 21), gates)
                assert not found, f"{op.name}: {found}"


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_past_keeps_its_bits_when_interpreted(part: str) -> None:
    check(part)
    if part == "sample":
        check_apart()


LENGTHS = {"batch": None, "packed": (70, 0, 130)}


def in_segments() -> None:
    """Segments are a chunk of the largest tile."""
    from slipstream.kernels.linear import scalar_decay, vector_decay
    from slipstream.kernels.linear.triton.delta import plan
    from slipstream.kernels.linear.triton.dplr import backend

    plan.delta_tokens = lambda programs, T, C: 64
    assert backend.plan.segments_for_programs.__module__ == plan.__name__
    for module in (scalar_decay, vector_decay):
        module.scalar_decay_tokens = lambda terms, programs, C, unit: 64


@interpreted
def test_states_are_left_when_interpreted() -> None:
    for segments in (False, True):
        if segments:
            in_segments()
        for operator in OPERATORS:
            for lengths in [*LENGTHS.values()][segments:]:  # in segments packed alone
                expect_prefix_states(
                    Call.make(operator, lengths, B=1, T=136, HV=1, impl="triton"), rtol=1e-4
                )
    for operator in OPERATORS:
        call = Call.make(operator, (70, 64), HV=1, impl="triton", consistent=True)
        _, pool, _ = call.run()
        alone = Call.make(operator, (70, 64), HV=1, impl="triton", consistent=True)
        for n, (_, begin, end) in enumerate(alone.places):
            piece = {name: x[:, begin:end] for name, x in alone.tensors.items()}
            single = Call(
                operator, piece, alone.state[n : n + 1], None, [(0, 0, end - begin)],
                alone.prefix._replace(rows=alone.prefix.rows[n : n + 1, : -(-(end - begin) // 64)]),
                alone.options,
            )  # fmt: skip
            single.run()
        assert torch.equal(alone.prefix.pool.nan_to_num(7), pool.nan_to_num(7)), operator


CALLS = {
    "kda": lambda q, k, v, g, unit, impl="triton": ops.chunk_kda(
        q=q, k=unit, v=v, g=g, beta=q[..., 0].sigmoid(), impl=impl
    ),
    "dplr": lambda q, k, v, g, unit, impl="triton": ops.chunk_dplr_delta_rule(
        q=q, k=k, v=v, a=-unit, b=unit * q.sigmoid(), gk=g, impl=impl
    ),
    "gla": lambda q, k, v, g, unit: ops.chunk_gla(q=q, k=k, v=v, g=g, impl="triton"),
    "rwkv6": lambda q, k, v, g, unit: ops.chunk_rwkv6(r=q, k=k, v=v, w=g, u=v[0, 0], impl="triton"),
    "gsa": lambda q, k, v, g, unit: ops.chunk_gsa(q=q, k=k, v=v, s=unit, g=g, impl="triton"),
}
D, T = 16, 64
# within the first half of a chunk of 16 and 32 tokens, and the second
CUTS = (3, 12, 36, 52)


def as_in_bfloat16() -> None:
    from slipstream.kernels.linear.triton.dplr import tiles
    from slipstream.kernels.linear.triton.vector_decay import backend

    whole = tiles.RANGES[torch.bfloat16]._replace(limit=tiles.RANGES[torch.float32].limit)
    tiles.RANGES[torch.float32] = whole
    backend.RANGES[torch.float32] = backend.RANGES[torch.bfloat16]


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v, unit = (torch.randn(1, T, 1, D) for _ in range(4))
    unit = torch.nn.functional.normalize(unit, dim=-1)
    # keys that lose digits where decays are 2^-110, and values that show it
    small = torch.where(torch.arange(T) % 3 == 0, 2.0**-20, 1.0)[None, :, None, None]
    k, unit, v = k * small, unit * small, v / small
    return q, k, v, -0.1 * torch.rand(1, T, 1, D), unit


def check_halves(name: str, part: str) -> None:
    """A sample: each gate with a cut in each half."""
    q, k, v, g, unit = inputs()
    before = CALLS[name](q, k, v, g, unit)[0]
    # the last ones are of every token: halves of a chunk then decay too far, and quarters do not
    gates = ((-20.0, 1.0), (-5.0, 1.0), (-200.0, 1.0), (-20.0, 0.0))
    for i, (strong, share) in enumerate(gates):
        for cut in CUTS[i % 2 :: 2] if part == "sample" else CUTS:
            later = strong * (1 - share * torch.rand_like(g[:, cut:]))
            future = torch.cat([g[:, :cut], later], 1)
            after = CALLS[name](q, k, v, future, unit)[0]
            assert torch.equal(before[:, :cut], after[:, :cut]), (name, strong, cut)


def check_small_reads(name: str) -> None:
    """Queries of 2^-46, after chunks that decay by 2^-76 to 2^-87 and then far more."""
    q, k, v, g, unit = inputs()
    q = 2.0**-46 * (1 + q.abs().clamp(max=0.9))
    for far in (76.0, 79.0, 81.0, 84.0, 86.5):
        gates = torch.zeros_like(g[:, :32])
        gates[:, :6] = -far / 6 / 1.4426950408889634
        given = [x[:, :32] for x in (q, k, v)]
        before = CALLS[name](*given, gates, unit[:, :32])[0][:, :8]
        gates[:, 8:] = -3.0
        after = CALLS[name](*given, gates, unit[:, :32])[0][:, :8]
        assert torch.equal(before, after), (name, far)


def check_edges(name: str) -> None:
    """Two quarters in one half that decay as far as one of them may, and weak gates after them."""
    q, k, v, g, unit = inputs()
    for far in (120.0, 159.0, 159.9, 160.05, 161.0):
        steps = torch.full((8,), -far / 4 / 1.4426950408889634)
        gates = torch.cat([steps[None, :, None, None].expand(1, 8, 1, D), g[:, 8:]], 1)
        o = CALLS[name](q, k, v, gates, unit)[0]
        given = (x.double() for x in (q, k, v, gates, unit))
        want = CALLS[name](*given, impl="reference")[0]
        error = (o - want).norm() / want.norm()
        assert error <= 2e-3, (name, far, float(error))


def round_operands() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    exact = builder.create_dot

    def in_bfloat16(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(np.array(x)).bfloat16().double().numpy()

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        # of gates and of ones, which kernels take in more than one part
        if any(np.isin(x.data, (-1, -0.5, 0, 0.5, 1)).all() for x in (a, b)):
            return exact(self, a, b, d, *precision)
        product = in_bfloat16(a.data) @ in_bfloat16(b.data) + d.data
        return TensorHandle(product.astype(np.float32), d.dtype.scalar)

    builder.create_dot = create_dot


def check_rounded(name: str, part: str) -> None:
    """Keys times 2^-28, and first halves that decay by about 2^-160, or will."""
    half = 8 if name in ("kda", "dplr") else 16
    for seed in range(2 if part == "sample" else 4):
        torch.manual_seed(seed)
        q, k, v, unit = (torch.randn(1, 2 * half, 1, D) for _ in range(4))
        unit = 2.0**-28 * torch.nn.functional.normalize(unit, dim=-1)
        past = -210 / half * torch.rand(1, 2 * half, 1, D)
        before = CALLS[name](q, 2.0**-28 * k, v, past, unit)[0]
        for cut in (half // 2 - 1, half - 3):
            for future in (0.0, -107 / half):
                g = torch.cat([past[:, :cut], torch.full_like(past[:, cut:], future)], 1)
                after = CALLS[name](q, 2.0**-28 * k, v, g, unit)[0]
                assert torch.equal(before[:, :cut], after[:, :cut]), (name, seed, cut, future)


def check_half_sums() -> None:
    """In base 2, the second half's from its first token on."""
    from tests.support.half_sums import half_sums_kernel

    g, found = -torch.rand(16, D), torch.empty(2, D)
    half_sums_kernel[(1,)](g, *found, 16, D)
    want = g.view(2, 8, D).sum(1) / np.log(2.0)
    torch.testing.assert_close(found, want)


def check_safe_decays() -> None:
    """A decay is safe up to its bound, past which factors of reads are 0 and of writes bounded."""
    from slipstream.kernels.linear.triton.common.gate_ones import gate_ones
    from tests.support.half_sums import factors_kernel, safe_kernel

    bound, shift, base_2 = 48.0, 8.0, 1 / np.log(2.0)
    bounds = torch.tensor([(bound + 0.125) * base_2, 160, 80, bound * base_2, bound / 16])
    given, safe = -bounds[:, None] * torch.tensor([1 - 1e-5, 1 + 1e-5]), torch.empty(5, 2)
    safe_kernel[(2,)](given, safe, bound)
    assert safe.tolist() == 5 * [[1.0, 0.0]]
    for further in (1 - 1e-5, 1 + 1e-5):
        g = torch.full((16, 16), -(bound + shift) / 16 * further)
        read, write = torch.empty(2, 16, 16)
        ones = gate_ones(torch.device("cpu"), 16, torch.float32)
        factors_kernel[(1,)](g, ones, read, write, bound, shift)
        sums = g.double().cumsum(0)
        safe = sums >= -(bound + shift)
        assert safe.all() == (further < 1)
        torch.testing.assert_close(read.double(), (sums + shift).exp() * safe, rtol=1e-4, atol=0.0)
        writes = (-sums - shift).clamp(max=bound).exp()
        torch.testing.assert_close(write.double(), writes, rtol=1e-4, atol=0.0)


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_small_inputs_keep_their_bits(part: str) -> None:
    check_half_sums()
    check_safe_decays()
    as_in_bfloat16()
    for name in CALLS:
        check_halves(name, part)
        if name != "rwkv6":  # whose u takes chunks whole or by blocks
            check_small_reads(name)
        if name in ("kda", "dplr"):
            check_edges(name)
    round_operands()
    for name in CALLS:
        check_rounded(name, part)
