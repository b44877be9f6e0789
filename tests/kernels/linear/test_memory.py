"""Calls whose scratch memory would be large, in groups of rows and heads, are the calls as a whole.
Every row of the catalogue is cut into as many groups as there can be, and has the same bits. Under
context parallelism, found out without a GPU: the memory that a rank holds on sm_90, and that all
ranks run the same kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from slipstream.compiler.trace import trace
from slipstream.kernels.linear import context, dispatch, gated_delta_product, gsa, op
from slipstream.kernels.linear.context_terms import Call
from slipstream.kernels.linear.dispatch import Asked, choose_plan
from slipstream.kernels.linear.inputs import ForwardCall, LinearInputs
from slipstream.kernels.linear.modes import memory
from slipstream.kernels.linear.modes.call import LinearOptions
from slipstream.runtime.context_parallel import Share
from slipstream.tools.catalog import Sample, flat
from tests.support import wants
from tests.support.memory import Allocated, make
from tests.support.operators import LINEAR, Size, packed, with_grads

K, V, H, T, SCALE, CHUNK = 8, 12, 3, 70, 0.3, 32
# others are of other families, or go token by token
CUT = [x for x in LINEAR if x.op.startswith("chunk_") and x.op not in ("chunk_hgrn", "chunk_rwkv4")]
SIZES = {
    "rows": Size(B=3, T=37, H=2, HV=4),
    "heads": Size(B=1, T=70, H=3, HV=6),
    "packed": packed(Size(H=2, HV=4), 33, 0, 1, 41),
    "wide": Size(B=2, T=9, H=2, HV=2, K=16, V=272),
}


@contextmanager
def tiny_limit() -> Iterator[list[memory.Groups]]:
    """Nothing may be left, and every call would leave much; yields how calls are cut."""
    seen: list[memory.Groups] = []
    whole = memory._run

    def run(call: Any, groups: memory.Groups) -> Any:
        seen.append(groups)
        return whole(call, groups)

    with (
        mock.patch.multiple(memory, MIN_ALLOWED_BYTES=0, scratch_bytes=lambda *_: 1 << 20),
        mock.patch.object(memory, "_run", run),
    ):
        dispatch._PLANS.clear()
        yield seen
    dispatch._PLANS.clear()


def assert_equal(run: Callable[[], list[Tensor]]) -> list[memory.Groups]:
    """Equal bits, but for the gradient of rwkv6's u [H, K], a sum over tokens: torch.sum may add
    up in another order where it adds up fewer at once."""
    whole = run()
    with tiny_limit() as seen:
        cut = run()
    for x, y in zip(whole, cut, strict=True):
        assert x.dtype == y.dtype
        assert x.dim() == 2 or torch.equal(x, y)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    return seen


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", CUT, ids=lambda op: op.name)
def test_groups_equal_whole(op: Sample, size: str) -> None:
    args = op.inputs(SIZES[size])

    def run() -> list[Tensor]:
        outputs, grads = with_grads(lambda args: flat(op(args)), args)
        with torch.no_grad():
            return [*flat(op(args)), *outputs, *grads]

    seen = assert_equal(run)
    assert all(groups.rows > 1 or groups.heads > 1 for groups in seen)
    assert len(seen) >= 2, "without gradients and with"


@pytest.mark.parametrize("options", [{"state_v_first": True}, {"reverse": True}], ids=str)
def test_groups_equal_whole_beside_other_modes(options: dict[str, Any]) -> None:
    op = next(x for x in LINEAR if x.op == "chunk_kda")
    args = op.inputs(Size(B=2, T=37, K=16, V=16))
    assert assert_equal(lambda: flat(op(args, **options)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert assert_equal(lambda: flat(op(args, **options)))


def test_groups_of_rows_come_before_those_of_heads() -> None:
    x = torch.empty(4, 100, 6, 16)
    terms = LinearInputs(x, x, x, beta=x[..., 0])
    each = 4 * 100 * 6
    with mock.patch.object(memory, "scratch_bytes", return_value=1 << 20):
        for count, wanted in ((1, None), (2, (2, 1)), (4, (4, 1)), (7, (4, 2)), (1000, (4, 6))):
            with mock.patch.object(memory, "MIN_ALLOWED_BYTES", -(-each * (1 << 20) // count)):
                assert memory.groups_of(terms, "triton", False) == wanted
        with mock.patch.object(memory, "MIN_ALLOWED_BYTES", 0):
            shared = terms._replace(beta=None, u=x[0, 0])
            assert memory.groups_of(shared, "triton", True) == (1, 6)
            cu = torch.tensor([0, 50, 100])
            alone = terms._replace(**{n: getattr(terms, n)[:1] for n in ("q", "k", "v", "beta")})
            assert memory.groups_of(alone._replace(cu_seqlens=cu), "triton", True) == (1, 6)


@pytest.mark.parametrize(("heads", "each"), [(6, 1), (1, 1 << 20)], ids=["allowed", "one head"])
def test_one_group_is_no_cut(heads: int, each: int) -> None:
    """Joining its results would copy them."""
    x = torch.empty(1, 100, heads, 16)
    terms = LinearInputs(x, x, x, beta=x[..., 0])
    with mock.patch.multiple(memory, MIN_ALLOWED_BYTES=0, scratch_bytes=lambda *_: each):
        assert memory.groups_of(terms, "triton", False) is None


@pytest.mark.parametrize("decay", ["none", "scalar", "channel"])
@pytest.mark.parametrize("transition", ["none", "delta", "dplr"])
@pytest.mark.parametrize("T", [8192, 1 << 17])
def test_groups_leave_what_is_allowed(T: int, transition: str, decay: str) -> None:
    size, width = (1, T, 64), 128
    make: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    x, one = torch.empty(*size, width, **make), torch.empty(*size, device="meta")
    g = {"none": None, "scalar": one, "channel": x.float()}[decay]
    beta = one if transition == "delta" else None
    a = x if transition == "dplr" else None
    terms = LinearInputs(x, x, x, g=g, beta=beta, a=a, b=a)
    given = sum(y.nbytes for y in terms if y is not None) + x.nbytes
    for grads in (False, True):
        groups = memory.groups_of(terms, "triton", grads) or memory.Groups(1, 1)
        scratch = T * 64 * memory.scratch_bytes(terms, "triton", grads)
        heads = -(-64 // groups.heads)
        assert scratch * heads / 64 <= max(4 << 30, given * (2 if grads else 1))
        assert (groups.heads > 1) == (scratch > max(4 << 30, given * (2 if grads else 1)))


def slots(B: int, with_states: bool) -> list[Tensor]:
    M = 16
    given = [torch.randn(B, T, H, n) for n in (K, K, V, M)]
    given.append(-torch.rand(B, T, H, M))
    states = [torch.randn(B, H, K, M), torch.randn(B, H, M, V)]
    return [x.requires_grad_() for x in given + (states if with_states else [])]


def steps(B: int, n: int, gated: bool, with_state: bool) -> gated_delta_product.Steps:
    given: dict[str, Any] = {
        "q": torch.randn(B, T, H, K),
        "k": normalize(torch.randn(B, T * n, H, K), dim=-1),
        "v": torch.randn(B, T * n, 2 * H, V),
        "beta": torch.rand(B, T * n, 2 * H),
        "g": -torch.rand(B, T, 2 * H) if gated else None,
        "state": torch.randn(B, 2 * H, K, V) if with_state else None,
    }
    for x in given.values():
        if x is not None:
            x.requires_grad_()
    return gated_delta_product.Steps(**given)


def results(outs: tuple[Tensor, ...], given: list[Tensor]) -> list[Tensor]:
    loss = torch.stack([(x**2).sum() for x in outs]).sum()
    return [*outs, *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("B", [1, 2])
def test_slots_in_groups_equal_whole(B: int, with_states: bool) -> None:
    given = slots(B, with_states)

    def run() -> list[Tensor]:
        with torch.no_grad():
            alone = gsa.attend(gsa.GSAInputs(*given), SCALE, CHUNK, "eager", "eager")
        outs = gsa.attend(gsa.GSAInputs(*given), SCALE, CHUNK, "eager", "eager")
        return [*alone, *results(outs, given)]

    with mock.patch.object(gsa, "in_groups", wraps=memory.in_groups) as made:
        assert_equal(run)
    assert made.called


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("B", [1, 2])
def test_steps_in_groups_equal_whole(B: int, gated: bool, with_state: bool) -> None:
    given = steps(B, 2, gated, with_state)
    leaves = [x for x in given if x is not None]

    def run() -> list[Tensor]:
        return results(gated_delta_product.product(given, SCALE, CHUNK, "eager"), leaves)

    with mock.patch.object(gated_delta_product, "in_groups", wraps=memory.in_groups) as made:
        assert_equal(run)
    assert made.called


def test_steps_are_tokens_of_the_delta_rule() -> None:
    n, given = 3, steps(2, 3, True, True)
    leaves = [x for x in given if x is not None]
    terms, _ = given.terms("eager")
    o, final = op.linear(terms, ForwardCall(SCALE, CHUNK, "eager"))
    want = results((o[:, n - 1 :: n], final), leaves)
    got = results(gated_delta_product.product(given, SCALE, CHUNK, "eager"), leaves)
    torch.testing.assert_close(got, want)


def test_operators_pass_opcheck() -> None:
    given = gsa.GSAInputs(*(x.detach() for x in slots(1, True)))
    options = (SCALE, CHUNK, "eager", "eager")
    for keep in (True, False):
        torch.library.opcheck(gsa._call_forward.overload, (*given, *options, keep))
    o, keys, values, p = gsa._forward(*given, *options, True)
    for ends in ((None, None), (keys, values)):
        torch.library.opcheck(gsa._call_backward.overload, (*given, p, o, *ends, *options))
    one = gated_delta_product.Steps(*(x.detach() for x in steps(1, 2, True, True) if x is not None))
    options = (SCALE, CHUNK, "eager")
    torch.library.opcheck(gated_delta_product._call_forward.overload, (*one, *options))
    o, final = gated_delta_product._forward(*one, *options)
    for end in (None, final):
        torch.library.opcheck(gated_delta_product._call_backward.overload, (*one, o, end, *options))


@pytest.mark.parametrize("kind", ["gla", "gated_delta_product", "gsa"])
def test_states_are_memory_that_is_given(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may take as much again as it is given, so that one with states is cut less."""
    monkeypatch.setattr(memory, "MIN_ALLOWED_BYTES", 1)
    monkeypatch.setattr(memory, "scratch_bytes", lambda *_: 80_000)
    x, state = torch.empty(64, 128, 2, 64), torch.empty(64, 2, 64, 64)

    def cut(state: Tensor | None) -> memory.Groups | None:
        if kind == "gla":
            return memory.groups_of(LinearInputs(x, x, x, g=x, initial_state=state), "triton", True)
        if kind == "gated_delta_product":
            steps = gated_delta_product.Steps(x, x, x, x[..., 0], state=state)
            return gated_delta_product._groups(steps, "triton", True)
        given = gsa.GSAInputs(x, x, x, x, x, state, state)
        return gsa._groups(given, "triton", "triton", True)

    fewer, more = cut(state), cut(None)
    assert fewer is not None and more is not None and fewer < more


RANKS, TOKENS = 2, 65536


class AnyMessages(Share):
    """Ranks of which no other is there."""

    def send(self, x: Tensor, to: list[int], sizes: dict[int, int]) -> dict[int, Tensor]:
        return {r: x.new_empty(n) for r, n in sizes.items()}


def inputs(kind: str, T: int, H: int, device: torch.device) -> LinearInputs:
    """As bench/context_parallel.py has them."""
    K = 64 if kind == "rwkv7" else 128
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    names = "qkvgab" if kind == "rwkv7" else "qkvg"
    given: dict[str, Tensor] = {n: torch.empty(1, T, H, K, **like) for n in names}
    if kind == "kda":
        given["beta"] = torch.empty(1, T, H, device=device)
    return LinearInputs(**given)


@wants.compiler
@pytest.mark.parametrize(
    ("kind", "H", "limit"),
    [("kda", 16, 0.58), ("kda", 32, 0.52), ("rwkv7", 32, 0.52), ("gla", 16, 0.52)],
)
def test_forward_memory_of_a_rank_is_about_half(kind: str, H: int, limit: float) -> None:
    """kda's 16 heads are two groups, since three take too long."""
    held: list[float] = []

    def call(device: torch.device) -> None:
        for rank in (None, *range(RANKS)):
            terms = inputs(kind, TOKENS * (RANKS if rank is None else 1), H, device)
            given = [x for x in terms if x is not None]
            with Allocated(given) as seen:
                if rank is None:
                    found = op.forward_impl(*terms, 0.1, 64, "sm90", False)
                else:
                    share = AnyMessages(rank, (TOKENS,) * RANKS, None)
                    options = Call(ForwardCall(0.1, 64, "sm90"), lambda _: "sm90", False)
                    found = context._forward(*terms, share, options, False)
                del found
            held.append(seen.peak + sum(x.nbytes for x in given))

    trace(call, "sm_90", backward=False)
    one, *ranks = held
    assert max(ranks) <= limit * one, [x / one for x in ranks]


TOKENS_CHOICE = (1, 40, 100, 144, 256, 1000, 20000)


def gla(T: int, H: int, device: torch.device) -> LinearInputs:
    wide = [torch.empty(1, T, H, 128, device=device, dtype=torch.bfloat16) for _ in "qkvg"]
    return LinearInputs(*wide)


@wants.compiler
@pytest.mark.parametrize("H", [2, 16, 64])
@pytest.mark.parametrize("kind", ["gla", "delta_rule", "gated", "kda", "dplr", "iplr"])
def test_kernels_do_not_depend_on_a_rank_s_tokens(kind: str, H: int) -> None:
    chosen = {}

    def call(device: torch.device) -> None:
        for T in TOKENS_CHOICE:
            terms = gla(T, H, device) if kind == "gla" else make(kind, (T,), H, device)
            asked = (Asked(context=(fixed, None)) for fixed in (True, False))
            fixed, free = (choose_plan(terms, LinearOptions(), False, x)[0] for x in asked)
            chosen[T] = fixed.impls, free.impls

    trace(call, "sm_90", backward=False)
    fixed, free = (set(x) for x in zip(*chosen.values()))
    assert len(fixed) == 1 and next(iter(fixed)).startswith("sm90")
    # the question is not idle: without fixed segments a few heads of few tokens are Triton's
    assert len(free) == (2 if kind == "gla" and H < 64 else 1)
