"""mixer_step: whole mixers token by token, in plain torch and in Triton, against the formula;
drafts for sm_90 in the emulator; registers, spills and loads of what is compiled ahead."""

import importlib
import inspect
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from slipstream.compiler.arch import ARCHS
from slipstream.kernels.mixer_step import op
from slipstream.kernels.mixer_step.inputs import StepInputs, StepOptions, counters_of
from slipstream.ops import mixer_step
from slipstream.runtime import dispatch
from tests.gluon_emulator import linear, threads
from tests.support import mixer_steps, wants
from tests.support.interpreted import PARTS, interpreted
from tests.support.mixer_steps import (
    INDICES,
    KINDS,
    LARGE,
    LIMIT,
    POOLS,
    B,
    Sizes,
    check,
    expected,
    job_of,
    make,
)
from tests.support.operators import relative_error

# arguments with a row for each token
TOKENS = ("q", "k", "v", "g", "beta", "z")
SMALL = Sizes(H=1, HV=2, K=16, V=16)
# of y, states and windows: one rounding each; the interpreter cuts off instead
HALF_LIMIT = 4e-3


def check_kind(kind: str, impl: str) -> None:
    check(kind, impl, Sizes())
    check(kind, impl, Sizes(H=1, HV=2, K=16, V=16, T=3), v_first=True)


def check_one_head_of_q_for_each_of_v(impl: str) -> None:
    check("gated_deltanet", impl, Sizes(H=3, HV=3, K=8, V=40), v_first=True)


def check_short_windows(impl: str) -> None:
    """Windows of W - 1 inputs, as engines keep them; and more tokens than taps, or one tap."""
    for T in (1, 6):
        check("gated_deltanet", impl, Sizes(H=1, HV=2, K=16, V=16, T=T, short=1))
    check("mamba2", impl, Sizes(H=1, HV=2, K=16, V=16, W=2, short=1))
    check("kda", impl, Sizes(H=1, HV=2, K=16, V=16, W=1))


def check_wide_heads(impl: str) -> None:
    """A head has several programs, which share the window of q and k, and the norm."""
    check("gated_deltanet", impl, Sizes(H=1, HV=1, K=130, V=150))
    check("gla", impl, Sizes(H=1, HV=2, K=20, V=300, T=2), v_first=True)
    check("mamba2 of engines", impl, Sizes(H=1, HV=2, K=100, V=40, T=2), v_first=True)


def check_groups_of_heads(impl: str) -> None:
    """The norm of Mamba-2 is over heads, more than one tile of them."""
    check("mamba2", impl, Sizes(H=2, HV=4, K=16, V=600))


def check_16_bits(impl: str) -> None:
    half = Sizes(dtype=torch.bfloat16, pool_dtype=torch.bfloat16)
    for kind in ("gated_deltanet", "mamba2"):
        check(kind, impl, half, limit=2 * HALF_LIMIT if impl == "triton" else HALF_LIMIT)


def check_strong_gates(impl: str) -> None:
    """Decays of nothing and of everything."""
    for strength in (0.0, 1e3):
        for kind in ("gated_deltanet", "kda", "kda bounded", "gla", "retention"):
            check(kind, impl, SMALL, strength=strength)


def check_padded_pools(impl: str) -> None:
    """Slots apart by more than a state and a window, as beside other layers' in one tensor."""
    args, options = make(KINDS["gated_deltanet"], SMALL)
    at = torch.tensor(INDICES, dtype=torch.int32)
    want = expected(args, options, at)
    wide, pools = {}, {}
    for name in POOLS:
        size = args[name][0].numel()
        wide[name] = torch.randn(mixer_steps.SLOTS, 2 * size + 5)
        pools[name] = wide[name][:, 3 : size + 3].unflatten(1, args[name].shape[1:])
        pools[name].copy_(args[name])
    # channels next to each other, and a head of z after another's
    taps_first = pools["conv_state"].mT.contiguous().mT
    args["z"] = torch.cat((args["z"], args["z"]), 2)[:, :, : SMALL.HV]
    given = {**args, "state": pools["state"], "conv_state": taps_first}
    around = {name: x[:, -3:].clone() for name, x in wide.items()}
    out = mixer_step(**given, **options, state_indices=at, impl=impl)
    assert relative_error(out, want["out"]) <= LIMIT
    assert relative_error(pools["state"], want["state"]) <= LIMIT
    assert relative_error(taps_first, want["conv_state"]) <= LIMIT
    assert all(torch.equal(wide[name][:, -3:], x) for name, x in around.items())


def check_projection(impl: str) -> None:
    """q, k and v as they lie in one projection; no indices, and what is returned."""
    args, options = make(KINDS["gated_deltanet"], SMALL)
    args |= {name: args[name][:B].clone() for name in POOLS}
    want = expected(args, options, None)
    x = torch.cat([args[name].flatten(2) for name in "qkv"], 2)
    keys, values = SMALL.H * SMALL.K, SMALL.HV * SMALL.V
    q, k, v = x.split([keys, keys, values], dim=2)
    args |= {"q": q.unflatten(2, (SMALL.H, SMALL.K)), "k": k.unflatten(2, (SMALL.H, SMALL.K))}
    args["v"] = v.unflatten(2, (SMALL.HV, SMALL.V))
    out = mixer_step(**args, **options, impl=impl)
    assert out.is_contiguous()
    for name, y in {"out": out, **{name: args[name] for name in POOLS}}.items():
        assert relative_error(y, want[name]) <= LIMIT, name


def check_nobody_lives(impl: str) -> None:
    """No NaN of a row without a slot reaches anything; an index past the pool is none."""
    for kind in ("gated_deltanet", "mamba2"):
        args, options = make(KINDS[kind], Sizes())
        args["v"].fill_(torch.nan)
        before = {name: args[name].clone() for name in POOLS}
        y = mixer_step(**args, **options, state_indices=torch.full((B,), -1), impl=impl)
        assert not y.any()
        assert all(torch.equal(args[name], x) for name, x in before.items())


def check_out_of_another_layout(impl: str) -> None:
    args, options = make(KINDS["gated_deltanet"], SMALL)
    want = expected(args, options, torch.tensor(INDICES))["out"]
    out = torch.full((SMALL.HV, B, 1, 2 * SMALL.V), torch.nan, dtype=torch.float64)
    out = out[..., : SMALL.V].permute(1, 2, 0, 3)
    y = mixer_step(**args, **options, state_indices=torch.tensor(INDICES), out=out, impl=impl)
    assert y is out
    assert relative_error(out, want) <= LIMIT


def check_step_after_step(impl: str) -> None:
    """Tokens one by one are tokens together; counters are 0 in between."""
    for kind in ("gated_deltanet", "mamba2"):
        args, options = make(KINDS[kind], Sizes(T=4))
        at = torch.tensor(INDICES)
        want = expected(args, options, at)
        ys = []
        for t in range(4):
            tokens = {n: x[:, t : t + 1] for n, x in args.items() if n in TOKENS}
            ys.append(mixer_step(**{**args, **tokens}, **options, state_indices=at, impl=impl))
            assert not counters_of(args["state"], 4).any()
        assert relative_error(torch.cat(ys, 1), want["out"]) <= LIMIT
        for name in POOLS:
            assert relative_error(args[name], want[name]) <= LIMIT


def check_drafts(impl: str) -> None:
    """The last call's tokens, of which some are accepted, and new ones, which leave no trace."""
    check("gated_deltanet", impl, Sizes(T=5, pending=2))
    check("kda", impl, Sizes(H=1, HV=2, K=16, V=16, T=7, W=3, pending=4, short=1), v_first=True)
    check("mamba2", impl, Sizes(T=4, pending=3))
    check("gla", impl, Sizes(H=1, HV=2, K=16, V=300, T=3, pending=2))
    check("delta_net", impl, Sizes(T=2, pending=2))  # no new ones: the accepted ones are flushed
    check("retention", impl, Sizes(T=2, pending=1))


def check_verification(impl: str) -> None:
    """Any drafts, any number of them accepted: y and what is left are those of decoding."""
    N, rounds, accepted = 3, 4, ((1, 3, 0), (2, 0, 3), (3, 1, 1), (0, 2, 2))
    args, options = make(KINDS["gated_deltanet"], Sizes(T=N, H=1, HV=2, K=16, V=16))
    pools = {name: args.pop(name)[:B].clone() for name in POOLS}
    tokens = {name: args.pop(name) for name in TOKENS}
    alone = {name: x.clone() for name, x in pools.items()}
    last = {name: torch.zeros_like(x) for name, x in tokens.items()}
    counts = torch.zeros(B, dtype=torch.int32)
    for r in range(rounds):
        drafts = {name: torch.randn_like(x) for name, x in tokens.items()}
        both = {name: torch.cat([last[name], x], 1) for name, x in drafts.items()}
        verify = {"num_pending": N, "num_accepted": counts, "impl": impl}
        y = mixer_step(**both, **args, **pools, **options, **verify)
        counts = torch.tensor(accepted[r], dtype=torch.int32)
        for n, count in enumerate(accepted[r]):
            row = {name: x[n : n + 1] for name, x in alone.items()}
            for t in range(count):
                one = {name: x[n : n + 1, t : t + 1] for name, x in drafts.items()}
                want = mixer_step(**one, **args, **row, **options, impl=impl)
                assert relative_error(y[n, t], want[0, 0]) <= LIMIT
        last = drafts
    none = {name: x[:, :0] for name, x in tokens.items()}
    both = {name: torch.cat([last[name], x], 1) for name, x in none.items()}
    verify = {"num_pending": N, "num_accepted": counts, "impl": impl}
    assert mixer_step(**both, **args, **pools, **options, **verify).shape[1] == 0
    for name in POOLS:
        assert relative_error(pools[name], alone[name]) <= LIMIT


def check_heads_of_one_column(impl: str) -> None:
    """The narrowest that there are, whose norm is of one number, or of two heads'."""
    for kind in ("gated_deltanet", "mamba2"):
        check(kind, impl, Sizes(K=1, V=1, T=2))


def check_heads_apart(impl: str) -> None:
    """NaN in a head changes no bit of the others, whose columns are fewer than a tile's."""
    place = slice(None), slice(None), 1
    runs = mixer_steps.beside_nan(impl, Sizes(H=3, HV=3, T=3), (*"qkvz", "beta", "g"), place)
    found = [[y[:, :, ::2], given["state"][:, ::2]] for y, given in runs]
    assert all(map(torch.equal, *found))


def check_probe(impl: str) -> None:
    """It allows for the rounding of states and windows that are narrower than the tokens."""
    from slipstream.kernels.mixer_step import op

    seen: list[tuple] = []
    narrow = Sizes(H=1, HV=2, K=16, V=16, pool_dtype=torch.bfloat16)
    args, options = make(KINDS["gated_deltanet"], narrow)
    step = op._call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_call", lambda *args, impl: seen.append((*args, impl)))
        mixer_step(**args, **options, state_indices=torch.tensor(INDICES))
        patch.setattr(dispatch, "TRITON_OR_EAGER", impl)
        assert step._mismatch(seen[0]) is None


CHECKS = (
    check_probe,
    check_drafts,
    check_verification,
    check_one_head_of_q_for_each_of_v,
    check_short_windows,
    check_wide_heads,
)
CHECKS += (check_groups_of_heads, check_16_bits, check_strong_gates, check_padded_pools)
CHECKS += (check_projection, check_nobody_lives, check_out_of_another_layout)
CHECKS += (check_step_after_step, check_heads_of_one_column, check_heads_apart)


@pytest.mark.parametrize("kind", KINDS)
def test_eager_step_matches_the_formula(kind: str) -> None:
    check_kind(kind, "eager")


def test_reference_takes_rates() -> None:
    check("mamba2 of engines", "reference", Sizes())


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__[6:])
def test_eager_step(check: Any) -> None:
    check("eager")


FAULTS: dict[str, dict[str, Any]] = {
    r"state: want shape \(3, 2, 16, 16\)": {"state_indices": None},
    r"conv_state: wants conv_weight too": {"conv_weight": None},
    r"conv_bias: wants conv_state": {"conv_weight": None, "conv_state": None},
    r"conv_state: want shape \(7, 64, 4\)": {"conv_state": torch.zeros(7, 64, 2)},
    r"conv_weight: want shape \(64, 4\)": {"conv_weight": torch.zeros(60, 4)},
    r"A_log: wants g too": {"g": None},
    r"A: wants no A_log": {"A": -torch.ones(2)},
    r"A: want shape \(2,\)": {"A": -torch.ones(3), "A_log": None},
    r"A: has no lower_bound": {"A": -torch.ones(2), "A_log": None, "lower_bound": -1.0},
    r"dt_bias: wants A_log or lower_bound": {"A_log": None},
    r"gate_logit_normalizer: wants g alone": {"gate_logit_normalizer": 16.0},
    r"lower_bound: want a number below 0": {"lower_bound": 1.0},
    r"dt_scales_v: wants g \[B, T, HV\] and A_log": {"dt_scales_v": True, "lower_bound": -1.0},
    r"dt_limit: want 0 <= least <= largest": {"dt_limit": (2.0, 1.0)},
    r"use_beta_sigmoid_in_kernel: wants beta": {"beta": None},
    r"allow_neg_eigval: doubles the sigmoid": {
        "use_beta_sigmoid_in_kernel": False,
        "allow_neg_eigval": True,
    },
    r"norm_weight: wants norm_eps": {"norm_eps": None},
    r"norm_weight: want shape \(2, 16\)": {"norm_weight": torch.zeros(3, 16)},
    r"norm_group_size: want a multiple of V = 16": {"norm_group_size": 24},
    r"norm_group_size: want a multiple .*, got 0": {"norm_group_size": 0},
    r"num_pending: want 0, or with num_accepted up to the 1 tokens": {"num_pending": 1},
    r"num_accepted: want shape \(3,\)": {"num_accepted": torch.zeros(2, dtype=torch.int32)},
    r"out: want shape \(3, 1, 2, 16\)": {"out": torch.zeros(3, 2, 16)},
    r"conv_activation: want one of": {"conv_activation": "relu"},
    r"z_activation: want one of": {"z_activation": "tanh"},
    r"channel_order: want one of": {"channel_order": "kqv"},
    r"state_indices: want less than the 7 slots, got 7": {"state_indices": torch.tensor([0, 7, 1])},
    r"state_indices: want each slot at most once": {"state_indices": torch.tensor([1, 1, -1])},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_step_refuses_what_does_not_fit(fault: str) -> None:
    args, options = make(KINDS["gated_deltanet"], SMALL)
    given = {**args, **options, "state_indices": torch.tensor(INDICES), **FAULTS[fault]}
    with pytest.raises(ValueError, match=fault):
        mixer_step(**given)


def test_step_refuses_gradients_and_kernels_without_a_gpu() -> None:
    args, options = make(KINDS["gated_deltanet"], SMALL)
    options |= {"state_indices": torch.tensor(INDICES)}
    weight = args["norm_weight"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients"):
        mixer_step(**args, **options)
    args["norm_weight"] = weight.detach()
    with pytest.raises(NotImplementedError, match="impl='triton'"):
        mixer_step(**args, **options, impl="triton")
    with pytest.raises(TypeError, match="state_indices: want int32 or int64"):
        mixer_step(**args, **{**options, "state_indices": torch.zeros(3)})


def test_counters_live_as_long_as_their_pool() -> None:
    pool = torch.zeros(4, 2, 3, 3)
    counters = counters_of(pool, 5)
    assert counters.shape == (4, 5)
    assert counters_of(pool.view(4, 2, 9), 5) is counters
    assert counters_of(pool, 6) is not counters
    assert counters_of(pool[1:], 5) is not counters_of(pool[:-1], 5)
    other = torch.zeros_like(pool)
    assert counters_of(other, 5) is not counters and counters_of(pool, 5) is counters
    del pool
    assert counters_of(torch.zeros(4, 2, 3, 3), 5) is not counters


@interpreted
@pytest.mark.parametrize("part", PARTS)
def test_triton_step_matches_the_formula(part: str) -> None:
    for check_more in CHECKS if part == "sample" else ():
        check_more("triton")
    for i, kind in enumerate(KINDS):
        if (i % 3 == 0 or kind == "gdn2") == (part == "sample"):
            check_kind(kind, "triton")


@wants.triton
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("PER_CHANNEL", [False, True])
@pytest.mark.sample(which=lambda arch, PER_CHANNEL: arch == "sm_90" and not PER_CHANNEL)
def test_step_compiles(arch: str, PER_CHANNEL: bool) -> None:
    got = job_of("kda" if PER_CHANNEL else "gated_deltanet", LARGE, arch).compile()
    assert got.stack <= 96, f"{got.stack} bytes spilled"
    assert got.shared <= ARCHS[arch].shared // 2
    # 128 numbers of the state a thread, and a few others
    assert got.ptx.count("ld.global.v4") == 32
    assert got.ptx.count("ld.global") <= 68, "vectors are loaded once for each row of the state"


@wants.triton
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16], ids=str)
def test_v_first_states_share_sums_among_few_lanes(pool: torch.dtype) -> None:
    """Loads of 16 bytes, and no sum of each register over a warp, which takes 5 x 64 shuffles."""
    size = replace(LARGE, pool_dtype=pool)
    got = job_of("gated_deltanet", size, state_v_first=True).compile()
    assert got.stack <= 96, f"{got.stack} bytes spilled"
    wide = re.findall(r"ld\.global\S*\.v4", got.ptx)
    assert len(wide) == (32 if pool == torch.float32 else 16)
    assert got.ptx.count("shfl.sync") <= 120


@wants.triton
@pytest.mark.parametrize(
    ("kind", "v_first", "tile"),
    [("linear_attn", True, (16, 1)), ("linear_attn", False, (128, 4)), ("gla", True, (128, 4))],
)
def test_plain_steps_v_first_have_narrow_tiles(kind: str, v_first: bool, tile: tuple) -> None:
    """gla has a norm, which programs of narrow tiles would share."""
    job = job_of(kind, replace(LARGE, pool_dtype=torch.float32), state_v_first=v_first)
    assert (job.constants["BV"], job.warps) == tile
    assert job.compile().stack == 0


@wants.triton
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [Sizes(), Sizes(T=3), Sizes(T=4, pending=2)], ids=["1", "3", "4-2"]
)
@pytest.mark.sample(which=lambda kind, size: size.T == 1 or kind == next(iter(KINDS)))
def test_every_launch_compiles(kind: str, size: Sizes) -> None:
    """Whatever is None, or not."""
    assert job_of(kind, replace(size, K=16, V=16)).compile().stack == 0


@wants.triton
@pytest.mark.parametrize(("kind", "v_first"), [("gated_deltanet", False), ("retention", True)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.sample(which=lambda kind, v_first, width: width == 128 and v_first)
def test_drafts_keep_states_in_registers(kind: str, v_first: bool, width: int) -> None:
    """Loads of 8 or 16 bytes, and no number of a state in shared memory; as many programs as fit
    by their registers."""
    size = Sizes(T=8, pending=4, H=2, HV=4, K=width, V=width, dtype=torch.bfloat16)
    job = job_of(kind, size, state_v_first=v_first)
    assert job.name == "mixer_drafts_sm90_kernel"
    got = job.compile()
    assert got.stack <= 200, f"{got.stack} bytes spilled"
    assert got.instructions["mma.sync"] == 3 * (width // 16 * 2) * 3
    wide = re.findall(rf"ld\.global\S*\.v{4 if v_first else 2}\.b32", got.ptx)
    numbers = width * width // (32 * width // 16)  # of a state in a thread
    assert len(wide) >= numbers // (4 if v_first else 2)
    assert got.shared <= 20 << 10


FAMILY = "slipstream.kernels.mixer_step"


def kernel() -> Any:
    with linear.emulated():
        made = importlib.import_module(f"{FAMILY}.sm90_kernels")
        vars(made)["halves"] = linear.halves
        return made.mixer_drafts_sm90_kernel


def run(args: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """By the emulator, as launches have it; the pools of args are written."""
    from slipstream.kernels.mixer_step import sm90_kernels as sm90
    from slipstream.kernels.mixer_step.triton import launch

    caught: list[Any] = []
    with mock.patch.object(op, "mixer_step", lambda *given: caught.extend(given)):
        mixer_step(**args, **options, state_indices=torch.tensor(INDICES), impl="eager")
    out, inputs, chosen = caught[:3]
    assert isinstance(inputs, StepInputs) and isinstance(chosen, StepOptions)
    counter = None
    if inputs.conv_state is not None:
        each = launch.counters_per_slot(inputs, chosen)
        counter = None if each is None else torch.zeros(len(args["state"]), each)
    out.fill_(torch.nan)
    emulated = kernel()
    launched: dict[str, Any] = {}

    class Launch:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **given: launched.update(given, programs=grid[0])

    with mock.patch.object(sm90, "cached", return_value=Launch()):
        sm90.drafts(launch.arguments(out, inputs, counter, chosen), inputs, chosen)
    programs = launched.pop("programs")
    for name in ("num_warps", "maxnreg"):
        launched.pop(name)
    names = list(inspect.signature(emulated).parameters)
    assert set(launched) == set(names)
    split = names.index("P")  # constants follow
    given = [launched[name] for name in names[:split]]
    pointers = [linear.Pointer(x) if isinstance(x, Tensor) else x for x in given]
    constants = {name: launched[name] for name in names[split:]}
    threads.launch(emulated, programs, tuple(pointers), **constants)
    assert counter is None or not counter.any()
    return out


@wants.triton
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("kind", ["gated_deltanet", "delta_net", "retention", "linear_attn"])
@pytest.mark.parametrize(
    ("K", "V", "T", "pending"), [(64, 64, 8, 4), (128, 64, 5, 1), (64, 128, 9, 8)]
)
def test_drafts_are_those_of_the_formula(
    kind: str, K: int, V: int, T: int, pending: int, v_first: bool
) -> None:
    n = Sizes(H=1, HV=2, K=K, V=V, T=T, pending=pending, short=K == 64, dtype=torch.float64)
    n = Sizes(**{**vars(n), "pool_dtype": torch.float64})
    args, options = make(KINDS[kind], n)
    args = {name: x.double() if x.is_floating_point() else x for name, x in args.items()}
    copies = {name: x.clone() for name, x in args.items()}
    want = expected(copies, options, torch.tensor(INDICES))
    if v_first:
        args["state"] = args["state"].mT.contiguous()
        options |= {"state_v_first": True}
    found = {"out": run(args, options), **{name: args[name] for name in POOLS if name in args}}
    if v_first:
        found["state"] = found["state"].mT
    for name, x in found.items():
        torch.testing.assert_close(x, want[name], msg=lambda text, name=name: f"{name}: {text}")
