"""Properties of every operator of the linear family and the scan, chunk and fused_recurrent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slipstream.common import linear_rows
from slipstream.kernels.linear.eager import layout
from slipstream.tools.catalog import Sample, family, flat
from tests.support import operators
from tests.support.causality import changed_bits
from tests.support.operators import LINEAR, Size, assert_near, budget, leaves, over_time, packed

# those that the default run takes over 1000 tokens, one of each transition
TRANSITIONS = {"chunk_simple_gla", "chunk_kda", "chunk_rwkv7"}

every_operator = pytest.mark.parametrize("op", LINEAR, ids=lambda op: op.name)


def operators_with(applies: Callable[[Sample], bool]) -> pytest.MarkDecorator:
    """The operators that a property speaks of."""
    return pytest.mark.parametrize("op", list(filter(applies, LINEAR)), ids=lambda op: op.name)


# T, H, HV, K, V: one token, one short of a power of two, several chunks, odd widths both ways
SIZES = [(1, 1, 2, 30, 60), (15, 2, 2, 64, 30), (63, 1, 1, 100, 64), (100, 1, 2, 128, 100)]
# of sizes and gates, in the default run: each of both, and the longest with three
PAIRS = {(SIZES[0], "weak"), (SIZES[1], "zero"), (SIZES[2], "mixed"), (SIZES[3], "weak")}
PAIRS |= {(SIZES[3], "mixed"), (SIZES[3], "strong")}


def run_with_grads(op: Sample, args: dict[str, Any], **options: Any):
    """Outputs, and gradients of all inputs for random gradients of output and final state."""
    return operators.with_grads(lambda args: flat(op(args, **options)), args)


@every_operator
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("gate", ["zero", "weak", "mixed", "strong"])
@pytest.mark.sample(which=lambda op, size, gate: (size, gate) in PAIRS)
def test_operator_matches_reference(op: Sample, size: tuple, gate: str) -> None:
    T, H, HV, K, V = size
    args = op.inputs(Size(B=1, T=T, H=H, HV=HV, K=K, V=V, gate=gate))
    want, want_grads = run_with_grads(op, operators.cast(args, torch.float64), impl="reference")
    got, grads = run_with_grads(op, args)
    assert_near(op, got, want, budget(torch.float32), "output")
    assert_near(op, grads, want_grads, 4 * budget(torch.float32), "gradient")


@pytest.mark.parametrize("size", [(1000, 1, 2, 60, 128), (1000, 2, 2, 128, 64)], ids=str)
@every_operator
@pytest.mark.sample(which=lambda op, size: op.name in TRANSITIONS)
def test_operator_matches_reference_over_a_long_sequence(op: Sample, size: tuple) -> None:
    test_operator_matches_reference(op, size, "weak")


@every_operator
def test_operator_in_float64_matches_reference_closely(op: Sample) -> None:
    args = op.inputs(Size(T=70, dtype=torch.float64, gate="mixed"))
    want, want_grads = run_with_grads(op, args, impl="reference")
    got, grads = run_with_grads(op, args)
    assert all(x.dtype == torch.float64 for x in got)
    assert_near(op, got, want, budget(torch.float64), "output")
    assert_near(op, grads, want_grads, 4 * budget(torch.float64), "gradient")


@every_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operator_in_16_bit_rounds_once(op: Sample, dtype: torch.dtype) -> None:
    args = op.inputs(Size(T=70, K=32, V=32, dtype=dtype))
    want, want_grads = run_with_grads(op, operators.cast(args, torch.float64), impl="reference")
    got, grads = run_with_grads(op, args)
    assert got[0].dtype == dtype
    assert all(x.dtype == torch.float32 for x in got[1:])
    assert_near(op, got, want, budget(dtype), "output")
    assert_near(op, grads, want_grads, 2 * budget(dtype), "gradient")


@every_operator
@pytest.mark.parametrize("cut", [1, 33, 64])
@pytest.mark.sample(which=lambda op, cut: cut == 33 or op.op.startswith("chunk_"))
def test_operator_split_equals_whole(op: Sample, cut: int) -> None:
    args = op.inputs(Size(T=70))
    whole = flat(op(args))
    first = op({**over_time(op, args, 0, cut), "initial_state": args["initial_state"]})
    second = op({**over_time(op, args, cut, 70), "initial_state": first[1]})
    got = [torch.cat([first[0], second[0]], dim=1), *flat(second)[1:]]
    assert_near(op, got, whole, budget(torch.float32), "split")


LENGTHS = [(70,), (5, 0, 64, 1), (0, 63, 65, 0)]


@every_operator
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.sample(which=lambda op, lengths: len(lengths) > 1)
def test_operator_packed_equals_separate(op: Sample, lengths: tuple[int, ...]) -> None:
    args, inputs = leaves(op.inputs(packed(Size(gate="mixed"), *lengths)))
    o, states = op(args)
    states = states if isinstance(states, tuple) else (states,)
    weights = [torch.randn_like(x) for x in (o, *states)]
    loss = sum(((x * w).sum() for x, w in zip((o, *states), weights)), torch.zeros(()))
    grads = torch.autograd.grad(loss, inputs)

    separate, loss, begin = [], torch.zeros(()), 0
    for n, length in enumerate(lengths):
        state = args["initial_state"]
        state = tuple(x[n : n + 1] for x in state) if isinstance(state, tuple) else state[n : n + 1]
        part = flat(op({**over_time(op, args, begin, begin + length), "initial_state": state}))
        loss = loss + (part[0] * weights[0][:, begin : begin + length]).sum()
        loss = loss + sum((x * w[n : n + 1]).sum() for x, w in zip(part[1:], weights[1:]))
        separate.append(part)
        begin += length
    want = [torch.cat([p[0] for p in separate], dim=1)]
    want += [torch.cat(list(x)) for x in list(zip(*separate))[1:]]
    want_grads = torch.autograd.grad(loss, inputs)
    assert_near(op, [o, *states], want, budget(torch.float32), "packed")
    assert_near(op, list(grads), list(want_grads), 4 * budget(torch.float32), "packed gradient")


@operators_with(lambda op: op.op.startswith("chunk_"))
def test_operator_in_spans_of_one_chunk_equals_whole(
    op: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What long sequences are computed in, a part at a time: here of the sizes of tests."""
    args = op.inputs(Size(B=2, T=150, H=1, HV=2, gate="mixed"))
    of_packed = op.inputs(packed(Size(H=1, HV=2, gate="mixed"), 5, 0, 130, 64))
    want = [run_with_grads(op, x) for x in (args, of_packed)]
    monkeypatch.setattr(layout, "BLOCK_ELEMENTS", 1)
    monkeypatch.setitem(linear_rows.CHUNK_ELEMENTS, "cpu", 1)
    for given, (outputs, grads) in zip((args, of_packed), want):
        got, got_grads = run_with_grads(op, given)
        assert_near(op, got, outputs, budget(torch.float32), "spans")
        assert_near(op, got_grads, grads, 4 * budget(torch.float32), "gradient of spans")


@every_operator
def test_operator_is_batch_invariant(op: Sample) -> None:
    args = op.inputs(Size(B=3, T=70))
    both = flat(op(args))
    for b in range(3):
        alone = {
            name: tuple(y[b : b + 1] for y in x)
            if isinstance(x, tuple)
            else x
            if name in op.dims and not operators.has_time(op, name)
            else x[b : b + 1]
            for name, x in args.items()
        }
        assert_near(op, flat(op(alone)), [x[b : b + 1] for x in both], 1e-6, "alone")
    for name in {"k", "v", "x", "B"} & args.keys():
        args[name][1] = torch.nan
    beside_nan = flat(op(args))
    assert beside_nan[0][1].isnan().any()
    assert all(torch.equal(x[::2], y[::2]) for x, y in zip(beside_nan, both))


@every_operator
def test_operator_gives_the_same_bits_again(op: Sample) -> None:
    args = op.inputs(Size(T=70))
    first, second = run_with_grads(op, args), run_with_grads(op, args)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@every_operator
@pytest.mark.parametrize("impl", [None, "reference"])
def test_operator_is_causal_bitwise(op: Sample, impl: str | None) -> None:
    assert not changed_bits(op, impl)


@operators_with(lambda op: op.op.startswith("chunk_") and "k" in op.dims)
def test_past_of_small_keys_keeps_its_bits(op: Sample) -> None:
    """Where a strong decay of one token meets the inverse of a later one's."""
    gates = ("weak", "strong"), ("strong", "weak")
    for small in (2.0**-24, 2.0**-40):
        assert not changed_bits(op, cuts=(21, 40), gates=gates, small=small)


@every_operator
@pytest.mark.parametrize("size", [Size(T=0), Size(B=0), packed(Size(), 0, 0)], ids=str)
def test_operator_takes_nothing(op: Sample, size: Size) -> None:
    args = op.inputs(size)
    got, grads = run_with_grads(op, args)
    states = args["initial_state"]
    states = states if isinstance(states, tuple) else [states]
    torch.testing.assert_close(got[1:], states, rtol=0, atol=0)
    assert got[0].numel() == 0
    assert not any(x.isnan().any() for x in grads)


def log_decays(op: Sample) -> set[str]:
    """Names of those; w is one of RWKV alone."""
    return set(op.dims) & {"g", "gk", "gv", *(["w"] if "r" in op.dims else [])}


@operators_with(lambda op: bool(log_decays(op)))
def test_operator_survives_gates_of_minus_infinity(op: Sample) -> None:
    """A decay of zero forgets the past: exact, not NaN."""
    args = op.inputs(Size(T=40))
    for name in log_decays(op):
        args[name][:, 20] = -torch.inf
    got, grads = run_with_grads(op, args)
    want, _ = run_with_grads(op, args, impl="reference")
    assert_near(op, got, want, budget(torch.float32), "output")
    assert not any(x.isnan().any() for x in grads)


# the states of hgrn and rwkv4 have no V, those of mamba3 are four, the normaliser's no K
@operators_with(
    lambda op: family(op.op) not in ("hgrn", "rwkv4", "mamba3") and "normalize" not in op.name
)
def test_operator_state_v_first_is_the_transpose(op: Sample) -> None:
    args = op.inputs(Size(T=20))
    o, state = op(args)
    turn = lambda x: x.mT if x.dim() == 4 and x.shape[1] > 1 else x  # noqa: E731
    flip = lambda s: tuple(map(turn, s)) if isinstance(s, tuple) else turn(s)  # noqa: E731
    turned = op({**args, "initial_state": flip(args["initial_state"])}, state_v_first=True)
    assert_near(op, [turned[0], *flat((o, flip(turned[1])))[1:]], flat((o, state)), 1e-6, "v first")


# Householder steps have an order within a token, which reverse keeps (test_delta_mappings.py)
@operators_with(lambda op: "gated_delta_product" not in op.name)
@pytest.mark.parametrize("lengths", [None, (5, 0, 15)], ids=str)
def test_operator_reverse_is_time_turned(op: Sample, lengths: tuple[int, ...] | None) -> None:
    size = Size(T=20) if lengths is None else packed(Size(), *lengths)
    args = op.inputs(size)
    parts = []
    for n, (begin, length) in enumerate(
        [(0, 20)] if lengths is None else [(0, 5), (5, 0), (5, 15)]
    ):
        cut = over_time(op, args, begin, begin + length)
        cut = {k: x.flip(1) if operators.has_time(op, k) else x for k, x in cut.items()}
        state = args["initial_state"]
        if lengths is not None:
            rows = slice(n, n + 1)
            state = tuple(x[rows] for x in state) if isinstance(state, tuple) else state[rows]
        o, *states = flat(op({**cut, "initial_state": state}))
        parts.append([o.flip(1), *states])
    want = [torch.cat([p[0] for p in parts], dim=1), *(torch.cat(x) for x in list(zip(*parts))[1:])]
    assert_near(op, flat(op(args, reverse=True)), want, budget(torch.float32), "reversed")


@every_operator
def test_operator_under_autocast_takes_its_dtype(op: Sample) -> None:
    args = op.inputs(Size(T=20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, *states = flat(op(args))
    want, *want_states = flat(op(args))
    assert o.dtype == (torch.float32 if "hgrn" in op.name else torch.bfloat16)
    assert all(x.dtype == torch.float32 for x in states)
    assert_near(
        op, [o, *states], [want, *want_states], 4 * operators.EPS[torch.bfloat16], "autocast"
    )


@every_operator
def test_operator_rejects_wrong_packing(op: Sample) -> None:
    """Offsets that do not fit the tokens are in test_invalid_calls.py."""
    args = op.inputs(packed(Size(), 12, 8))
    for wrong in (torch.tensor([0.0, 12.0, 20.0]), torch.tensor([[0, 12, 20]]), torch.tensor([0])):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens: want "):
            op({**args, "cu_seqlens": wrong})
    with pytest.raises(ValueError, match=r"cu_seqlens.*batch size 1"):
        op({**op.inputs(Size(B=2, T=20)), "cu_seqlens": operators.offsets((12, 8))})


@operators_with(lambda op: "chunk" in op.name and family(op.op) not in ("hgrn", "rwkv4"))
def test_operator_rejects_chunk_size(op: Sample) -> None:
    args = op.inputs(Size(T=20))
    for wrong in (8, 48, 512, *(128,) * (family(op.op) == "kda")):
        with pytest.raises(ValueError, match="chunk_size: want "):
            op(args, chunk_size=wrong)
    for right in (32, 64) if family(op.op) == "kda" else (16, 32, 128):
        assert_near(op, flat(op(args, chunk_size=right)), flat(op(args)), 1e-5, "chunk size")
